// The messages of a conversation, and how far the one that is being written has come.
import * as chat from "./chat.js";
import { grown, sends } from "./composer.js";
import { places } from "./conversations.js";
import { html, memo, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { copied, show } from "./markdown.js";
import { value } from "./metrics.js";
import { split } from "./thinking.js";

const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const seconds = (ms) => (ms < 9_950 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`);

function Markdown({ text }) {
  const element = useRef(null);
  useLayoutEffect(() => show(element.current, text), [text]);
  return html`<div class="markdown" ref=${element}></div>`;
}

// Milliseconds since `from`, told anew while it is shown.
function useElapsed(from) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 200);
    return () => clearInterval(timer);
  }, []);
  return Math.max(0, now - from);
}

function Waiting({ since, looks, usage }) {
  const elapsed = useElapsed(since);
  const [running, waiting] = [value(looks, "vllm:num_requests_running"), value(looks, "vllm:num_requests_waiting")];
  const words = ["Waiting for the first token", seconds(elapsed)];
  if (usage) words.push(`${count(usage.prompt, "prompt token")}, ${usage.cached.toLocaleString("en")} of them cached`);
  if (waiting > 0) words.push(`${count(running, "request")} ${running === 1 ? "runs" : "run"}, ${count(waiting, "waits", "wait")}`);
  return html`<p class="waiting"><i class="busy" aria-hidden="true"></i>${words.join(" · ")}</p>`;
}

function ThinkingFor({ since }) {
  return html`Thinking · ${seconds(useElapsed(since))}`;
}

function Thought({ thought, isOpen, times }) {
  const [unfolded, setUnfolded] = useState(false);
  const took = times?.first && (times.answer ?? times.end) ? (times.answer ?? times.end) - times.first : null;
  return html`<details class="thought" onToggle=${(e) => setUnfolded(e.target.open)}>
    <summary>${isOpen ? html`<${ThinkingFor} since=${times.first} />` : took === null ? "Thoughts" : `Thought for ${seconds(took)}`}</summary>
    ${unfolded && html`<${Markdown} text=${thought} />`}
  </details>`;
}

function facts({ usage, times, finish }) {
  const words = [];
  if (usage?.generated) {
    words.push(count(usage.generated, "token"));
    const writing = times?.first ? (times.end - times.first) / 1000 : 0;
    if (usage.generated > 1 && writing > 0.05) words.push(`${((usage.generated - 1) / writing).toFixed(1)} tokens/s`);
  }
  if (times?.first) words.push(`first token after ${seconds(times.first - times.sent)}`);
  if (usage) words.push(`${count(usage.prompt, "prompt token")}, ${usage.cached.toLocaleString("en")} cached`);
  if (finish === "stopped") words.push("stopped by you");
  return words.join(" · ");
}

function Trouble({ failure, id }) {
  const [, setTick] = useState(0);
  const left = Math.ceil(((failure.retryAt ?? 0) - Date.now()) / 1000);
  useEffect(() => {
    if (left <= 0) return;
    const timer = setInterval(() => setTick((n) => n + 1), 500);
    return () => clearInterval(timer);
  }, [left <= 0]);
  const again = failure.kind === "lost" ? "Send again" : "Try again";
  return html`<div class="trouble" role="alert">
    <p>${failure.words}</p>
    <div class="actions">
      ${failure.kind === "key" && html`<button type="button" onClick=${() => chat.openSettings(true)}>Settings</button>`}
      ${failure.kind === "overflow" && html`<button type="button" onClick=${chat.begin}>New conversation</button>`}
      <button type="button" disabled=${left > 0} onClick=${() => chat.regenerate(id)}>${left > 0 ? `${again} in ${left} s` : again}</button>
    </div>
  </div>`;
}

function CopyButton({ text }) {
  const [words, setWords] = useState("Copy");
  const copy = async () => {
    setWords((await copied(text)) ? "Copied" : "Cannot copy");
    setTimeout(() => setWords("Copy"), 1500);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${words}</button>`;
}

// Between the versions of a message.
function Versions({ index, of, before, after }) {
  if (of < 2) return null;
  return html`<span class="versions" role="group" aria-label="Versions">
    <button type="button" class="quiet" aria-label="Version before" disabled=${!before} onClick=${() => chat.turnTo(before)}>‹</button>
    <span>${index + 1} of ${of}</span>
    <button type="button" class="quiet" aria-label="Version after" disabled=${!after} onClick=${() => chat.turnTo(after)}>›</button>
  </span>`;
}

function Editor({ message }) {
  const [text, setText] = useState(message.content);
  const field = useRef(null);
  useLayoutEffect(() => grown(field.current), [text]);
  useEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const submit = () => text.trim() && chat.edit(message.id, text.trim());
  const onKeyDown = (e) => {
    if (!sends(e)) return;
    e.preventDefault();
    submit();
  };
  return html`<div class="editor">
    <textarea ref=${field} aria-label="Edit your message" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="actions">
      <button type="button" class="main" disabled=${text.trim() === ""} onClick=${submit}>Send</button>
      <button type="button" onClick=${() => chat.setEditing(null)}>Cancel</button>
    </div>
  </div>`;
}

const Mine = memo(({ message, isEditing, isBusy, ...versions }) => html`<article class="mine">
  <h2 class="off-screen">You</h2>
  ${isEditing ? html`<${Editor} message=${message} />` : html`<div class="said">${message.content}</div>`}
  ${!isEditing &&
  html`<footer class="actions">
    <${Versions} ...${versions} />
    <button type="button" class="quiet" disabled=${isBusy} onClick=${() => chat.setEditing(message.id)}>Edit</button>
    <${CopyButton} text=${message.content} />
  </footer>`}
</article>`);

const Answer = memo(({ message, isWritten, isBusy, looks, ...versions }) => {
  const { thought, text, open } = split(message.content, message.reasoning);
  const isThinking = isWritten && (open || text === "");
  const isWaiting = isWritten && !message.times.first;
  // The page was closed while it was written.
  const isCut = !isWritten && !message.finish && !message.failure;
  return html`<article class=${`answer ${isWritten ? "written" : ""}`}>
    <h2 class="off-screen">Answer</h2>
    ${thought && html`<${Thought} thought=${thought} isOpen=${isThinking} times=${message.times} />`}
    ${isWaiting && html`<${Waiting} since=${message.times.sent} looks=${looks ?? []} usage=${message.usage} />`}
    ${text && html`<${Markdown} text=${text} />`}
    ${message.failure && html`<${Trouble} failure=${message.failure} id=${message.id} />`}
    ${isCut && html`<p class="remark">This answer was cut off when the page was closed.</p>`}
    ${message.finish === "length" && html`<p class="remark">It ends here because the limit of tokens, or the end of the context, was reached.</p>`}
    ${!isWritten && !thought && !text && message.finish && html`<p class="remark">${message.finish === "stopped" ? "Stopped before the first token." : "The answer is empty."}</p>`}
    ${!isWritten &&
    html`<footer class="actions">
      <${Versions} ...${versions} />
      ${!message.failure && html`<button type="button" class="quiet" disabled=${isBusy} onClick=${() => chat.regenerate(message.id)}>Regenerate</button>`}
      ${text && html`<${CopyButton} text=${text} />`}
      <span class="figures-line">${facts(message)}</span>
    </footer>`}
  </article>`;
});

function Empty({ facts: known, failure }) {
  return html`<div class="empty">
    <p class="large">${known ? "What would you like to know?" : failure ? "The server does not answer yet" : "Asking the server"}</p>
    <p>${failure ? failure.words : known}</p>
    ${failure?.kind === "key" && html`<p><button type="button" onClick=${() => chat.openSettings(true)}>Settings</button></p>`}
    ${!failure && html`<p class="hint">The model runs on the machine that serves this page. Conversations are kept in this browser.</p>`}
  </div>`;
}

// Closer to the end than this, in pixels, it is kept at the end.
const AT_END = 4;

export function Log({ id, messages, conversation, answering, editing, looks, facts: known, modelFailure }) {
  const box = useRef(null);
  const inner = useRef(null);
  const follows = useRef(true);
  const [isFar, setFar] = useState(false);
  const toEnd = () => {
    follows.current = true;
    box.current.scrollTop = box.current.scrollHeight;
  };
  useLayoutEffect(toEnd, [id, answering !== null]);
  useEffect(() => {
    const observer = new ResizeObserver(() => follows.current && toEnd());
    observer.observe(inner.current);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    const left = scrollHeight - scrollTop - clientHeight;
    if (left <= AT_END) follows.current = true;
    setFar(left > clientHeight / 2);
  };
  // Whoever scrolls back wants to read there.
  const onWheel = (e) => e.deltaY < 0 && (follows.current = false);
  const onTouch = () => (follows.current = false);

  const found = places(conversation);
  const versions = (message) => {
    const all = found.get(message.parent);
    const index = all.indexOf(message);
    return { index, of: all.length, before: all[index - 1]?.id, after: all[index + 1]?.id };
  };
  const isBusy = answering !== null;
  return html`<div class="middle">
    <div
      class="log"
      role="log"
      aria-label="Conversation"
      aria-busy=${isBusy}
      tabindex="0"
      ref=${box}
      onScroll=${onScroll}
      onWheel=${onWheel}
      onTouchMove=${onTouch}
      onKeyDown=${(e) => ["PageUp", "ArrowUp", "Home"].includes(e.key) && (follows.current = false)}
    >
      <div class="column" ref=${inner}>
        ${messages.length === 0 && html`<${Empty} facts=${known} failure=${modelFailure} />`}
        ${messages.map((m) => {
          const more = { key: m.id, message: m, isBusy, ...versions(m) };
          if (m.role === "user") return html`<${Mine} ...${more} isEditing=${editing === m.id} />`;
          const isWritten = m.id === answering;
          return html`<${Answer} ...${more} isWritten=${isWritten} looks=${isWritten && !m.times.first ? looks : null} />`;
        })}
      </div>
    </div>
    ${isFar && html`<button type="button" class="to-end" onClick=${toEnd}>Go to the end</button>`}
  </div>`;
}
