// node sdk.mjs WAY URL TASK: an agent as small as can be, around the SDK that OpenAI publishes: three tools, called until the model has no more calls.
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import OpenAI from "openai";

const [way, url, task] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

const described = {
  read: ["Reads a file.", ["path"], ({ path }) => readFileSync(path, "utf8")],
  edit: ["Replaces a text in a file.", ["path", "old", "new"], (a) => (writeFileSync(a.path, readFileSync(a.path, "utf8").replace(a.old, a.new)), "done")],
  run: ["Runs a command.", ["command"], ({ command }) => execSync(command, { encoding: "utf8" })],
};
const schema = (names) => ({
  type: "object", properties: Object.fromEntries(names.map((name) => [name, { type: "string" }])), required: names, additionalProperties: false,
});

// The SDK's own loop, over streams.
async function chat() {
  const tools = Object.entries(described).map(([name, [description, names, call]]) => ({
    type: "function", function: { name, description, parameters: schema(names), function: call, parse: JSON.parse },
  }));
  const runner = client.chat.completions.runTools({ model: "any", messages: [{ role: "user", content: task }], tools, stream: true });
  return runner.finalContent();
}

async function responses() {
  const tools = Object.entries(described).map(([name, [description, names]]) => ({ type: "function", name, description, parameters: schema(names), strict: true }));
  const input = [{ role: "user", content: task }];
  for (;;) {
    const response = await client.responses.stream({ model: "any", input, tools, store: false }).finalResponse();
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    for (const call of calls) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: described[call.name][2](JSON.parse(call.arguments)) });
    }
  }
}

console.log(await { chat, responses }[way]());
