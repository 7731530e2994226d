// Asking the server: /v1/chat/completions as a stream of events, and what goes wrong said in words.

// What stands in the way of an answer. `kind`: key, loading, full, overflow, refused, server, lost.
export class Failure extends Error {
  constructor(kind, words, more = {}) {
    super(words);
    Object.assign(this, { kind, ...more });
  }
}

const bearer = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function asked(path, init, key) {
  let response;
  try {
    response = await fetch(path, { ...init, headers: { ...init.headers, ...bearer(key) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("lost", "The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

export const models = async (key) => (await (await asked("v1/models", {}, key)).json()).data ?? [];
export const metrics = async (key) => (await asked("metrics", {}, key)).text();

async function failureOf(response) {
  const text = await response.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy on the way has answered in its own words.
  }
  return inWords(response.status, error, Number.parseInt(response.headers.get("retry-after"), 10));
}

const count = (text) => Number(text).toLocaleString("en");

function inWords(status, error, retryAfter) {
  const said = typeof error.message === "string" && error.message ? error.message : `The server answered with status ${status}.`;
  const more = Number.isFinite(retryAfter) ? { retryAfter } : {};
  if (status === 401 || status === 403) {
    return new Failure("key", "This server wants an API key. Put it into the settings, then try again.");
  }
  if (status === 429) return new Failure("full", `The server's queue is full: ${said}.`.replace(/\.\.$/, "."), more);
  if (status === 503) {
    const words = /loading/i.test(said) ? "The model is still being loaded." : `The server does not take requests now: ${said}.`;
    return new Failure("loading", words, more);
  }
  if (error.code === "context_length_exceeded") {
    const [, most, had] = /context length is (\d+) tokens.*?(\d+) tokens/s.exec(said) ?? [];
    const words = had
      ? `This conversation is too long: it has ${count(had)} tokens, and the model's context holds ${count(most)}. Shorten an earlier message, or begin a new conversation.`
      : said;
    return new Failure("overflow", words);
  }
  if (status >= 500) return new Failure("server", `Something went wrong in the server: ${said}`);
  return new Failure("refused", `The server refused this: ${said}`);
}

// Events of a stream, as their data: lines end in \n, \r\n or \r, an event ends at an empty line.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (;;) {
        const end = /\r\n|\n|\r(?=.)/s.exec(rest);
        if (!end) break;
        const line = rest.slice(0, end.index);
        rest = rest.slice(end.index + end[0].length);
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function body(messages, settings, model) {
  const { system, thinking, ...sampling } = settings;
  const given = Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== null));
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...given,
    ...(thinking === null ? {} : { chat_template_kwargs: { enable_thinking: thinking } }),
  };
}

// An answer's parts as they come: {content}, {reasoning}, {finish}, {usage}. Throws a Failure, or an AbortError where `signal` stopped it.
export async function* answer({ messages, settings, model, key, signal }) {
  const init = {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(body(messages, settings, model)),
    signal,
  };
  const response = await asked("v1/chat/completions", init, key);
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw inWords(Number(chunk.error.code) || 500, chunk.error, Number.NaN);
      const choice = chunk.choices?.[0];
      const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
      if (reasoning) yield { reasoning };
      if (choice?.delta?.content) yield { content: choice.delta.content };
      if (choice?.finish_reason) {
        finished = true;
        yield { finish: choice.finish_reason };
      }
      if (chunk.usage) {
        const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = chunk.usage;
        yield { usage: { prompt, generated, cached: details?.cached_tokens ?? 0 } };
      }
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("lost", "The connection was lost before the answer was complete.");
  }
  if (!finished) throw new Failure("lost", "The connection was lost before the answer was complete.");
}
