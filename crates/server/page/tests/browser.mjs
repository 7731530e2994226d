// What the tests stand on: a real server, a real browser, and an answer that a test writes word by word. A page that breaks its policy, throws, logs an error or
// asks another host fails the test that opened it.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const DESKTOP = { width: 1360, height: 860 };
export const PHONE = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

// `sluice serve` with the demo model, on a port that is free; or, with PAGE_ADDRESS, a server that runs already.
export async function startServer() {
  if (process.env.PAGE_ADDRESS) return { address: process.env.PAGE_ADDRESS, stop() {} };
  const child = spawn(process.env.SLUICE, ["serve", process.env.MODEL, "--port", "0"], { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  let address = null;
  for await (const line of createInterface({ input: child.stderr })) {
    said += `${line}\n`;
    address ??= /listening on (http:\S+)/.exec(line)?.[1] ?? null;
    if (line.includes("ready")) break;
  }
  child.stderr.resume();
  assert.ok(address, `the server does not start:\n${said}`);
  return { address, stop: () => child.kill("SIGTERM") };
}

// Stands in for the model: `next()` is a request, which the test answers piece by piece.
export async function startScript() {
  const arrived = [];
  const wanted = [];
  const server = createServer(async (request, response) => {
    let body = "";
    for await (const piece of request) body += piece;
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.flushHeaders();
    const event = (value) => response.write(`data: ${JSON.stringify(value)}\n\n`);
    const asked = {
      body: JSON.parse(body),
      headers: request.headers,
      closed: new Promise((done) => response.on("close", done)),
      delta: (delta) => event({ choices: [{ index: 0, delta, finish_reason: null }] }),
      write: (content) => asked.delta({ content }),
      event,
      end(finish = "stop", usage = { prompt_tokens: 1000, completion_tokens: 20, prompt_tokens_details: { cached_tokens: 900 } }) {
        event({ choices: [{ index: 0, delta: {}, finish_reason: finish }] });
        event({ choices: [], usage });
        response.end("data: [DONE]\n\n");
      },
      lose: () => response.destroy(),
    };
    const then = wanted.shift();
    if (then) then(asked);
    else arrived.push(asked);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return {
    address: `http://127.0.0.1:${server.address().port}`,
    next: () => (arrived.length > 0 ? Promise.resolve(arrived.shift()) : new Promise((done) => wanted.push(done))),
    stop: () => (server.closeAllConnections(), server.close()),
  };
}

export const startBrowser = () =>
  // Chromium's own sandbox does not run as root, which containers are.
  chromium.launch({ executablePath: process.env.CHROMIUM, args: process.getuid() === 0 ? ["--no-sandbox"] : [] });

// A page in a browser that has never seen this server. `check` ends it.
export async function opened(browser, { address }, options = {}) {
  const context = await browser.newContext({ viewport: DESKTOP, ...options });
  context.setDefaultTimeout(120_000);
  const page = await context.newPage();
  const wrong = [];
  await page.exposeFunction("violated", (what) => wrong.push(`policy: ${what}`));
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (e) => window.violated(`${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
  });
  page.on("pageerror", (error) => wrong.push(`error: ${error.stack}`));
  page.on("console", (message) => {
    // Statuses are part of what is tested.
    if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) wrong.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    const isHere = request.url().startsWith(`${address}/`) || /^(blob|data):/.test(request.url());
    if (!isHere) wrong.push(`asked elsewhere: ${request.url()}`);
  });
  await page.goto(address);
  const message = page.getByLabel("Message", { exact: true });
  return Object.assign(page, {
    wrong,
    message,
    answers: page.locator("article.answer"),
    mine: page.locator("article.mine .said"),
    list: page.getByRole("navigation", { name: "Conversations" }).getByRole("listitem"),
    // Answers come from the script instead of the model.
    follow: (script) => page.route("**/v1/chat/completions", (route) => route.continue({ url: `${script.address}/v1/chat/completions` })),
    begin: () => page.locator("button.new").click(),
    async send(text) {
      await message.fill(text);
      await page.getByRole("button", { name: "Send", exact: true }).last().click();
    },
    // The last answer, once it is there as a whole.
    async done(count = 1) {
      await page.getByRole("button", { name: "Regenerate" }).nth(count - 1).waitFor();
      return page.locator("article.answer").nth(count - 1);
    },
    async check() {
      assert.deepEqual(wrong, []);
      await context.close();
    },
  });
}
