// Draws docs/pictures: the page with the demo model, whose experts come from disk and have a fifth of the memory they want, while a few others ask it too.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { PHONE, opened, startBrowser } from "./browser.mjs";

const [folder] = process.argv.slice(2);
const flags = ["--port", "0", "--experts", "slots", "--expert-budget", "12M"];
const child = spawn(process.env.SLUICE, ["serve", process.env.MODEL, ...flags], { stdio: ["ignore", "ignore", "pipe"] });
let address;
for await (const line of createInterface({ input: child.stderr })) {
  address ??= /listening on (http:\S+)/.exec(line)?.[1];
  if (line.includes("ready")) break;
}
child.stderr.resume();

const browser = await startBrowser();
const STORY = "Tell me a story about a fox and a hen.";
let isOver = false;
const others = [1, 2].map(async (number) => {
  while (!isOver) {
    const messages = [{ role: "user", content: `Tell me a story about ${number} ducks.` }];
    await fetch(`${address}/v1/chat/completions`, { method: "POST", body: JSON.stringify({ messages, max_tokens: 60 * number }) }).then((r) => r.text());
    await sleep(700 * number);
  }
});

async function talk(page, seed) {
  await page.getByRole("button", { name: "Settings", exact: true }).click();
  await page.getByLabel("Seed").fill(`${seed}`);
  await page.getByLabel("Tokens at most").fill("150");
  await page.keyboard.press("Escape");
  for (const [i, text] of ["Tell me about a boat.", STORY].entries()) {
    await page.getByRole("button", { name: "New conversation" }).click();
    await page.send(text);
    await page.done();
    if (i === 0) continue;
    await page.send("And what did the hen say?");
    await page.done(2);
  }
}

const desktop = await opened(browser, { address }, { viewport: { width: 1280, height: 800 }, colorScheme: "light" });
await talk(desktop, 7);
await sleep(40_000);
await desktop.screenshot({ path: `${folder}/page-light.png` });
await desktop.emulateMedia({ colorScheme: "dark" });
await sleep(2_000);
await desktop.screenshot({ path: `${folder}/page-dark.png` });
await desktop.check();

const phone = await opened(browser, { address }, { ...PHONE, deviceScaleFactor: 1.5, colorScheme: "light" });
await phone.getByRole("button", { name: "Settings", exact: true }).tap();
await phone.getByLabel("Seed").fill("7");
await phone.getByLabel("Tokens at most").fill("100");
await phone.keyboard.press("Escape");
await phone.send(STORY);
await phone.done();
// The keyboard's ring is not for fingers.
await phone.evaluate(() => document.activeElement.blur());
await phone.screenshot({ path: `${folder}/page-phone.png` });
await phone.check();

isOver = true;
await Promise.all(others);
await browser.close();
child.kill("SIGTERM");
