// A model's text as HTML. Whatever stands in it is hostile: HTML in it is shown, not obeyed; pictures become links, so that nothing is fetched; and what marked
// makes of the rest goes through DOMPurify with a short list of what may stay. The page's content security policy stands behind both.
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const MAY_STAY = {
  ALLOWED_TAGS: [
    ..."p br hr h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td a".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start", "data-language"],
  // Only `href` is held against the pattern.
  ADD_URI_SAFE_ATTR: ["align", "start", "data-language"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text.trimEnd()).replaceAll("\n", "<br>")}</p>` : escaped(text)),
    image({ href, text }) {
      return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // The page has headings of its own above these.
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    code: ({ text, lang }) => `<pre data-language="${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}</code></pre>`,
  },
});

// Makes `element` show `text`. Blocks that are as they were stay: while an answer is streamed only its last one is made anew, and what is selected stays so.
export function show(element, text) {
  let blocks;
  try {
    blocks = marked.lexer(text);
  } catch {
    // Nested too deeply, say.
    blocks = [{ type: "plain", raw: text }];
  }
  const shown = (element.shownBlocks ??= []);
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same].raw === blocks[same].raw && shown[same].links === linksOf(blocks)) same++;
  for (const old of shown.splice(same)) old.nodes.forEach((node) => node.remove());
  for (const block of blocks.slice(same)) {
    const nodes = [...fragment(block, blocks.links).childNodes];
    element.append(...nodes);
    shown.push({ raw: block.raw, links: linksOf(blocks), nodes });
  }
}

// A definition at the end (`[1]: address`) changes the blocks that refer to it.
const linksOf = (blocks) => Object.keys(blocks.links ?? {}).length;

function fragment(block, links) {
  const plain = () => {
    const made = document.createDocumentFragment();
    const paragraph = document.createElement("p");
    paragraph.className = "plain";
    paragraph.textContent = block.raw;
    made.append(paragraph);
    return made;
  };
  if (block.type === "plain") return plain();
  let clean;
  try {
    clean = DOMPurify.sanitize(marked.parser(Object.assign([block], { links })), MAY_STAY);
  } catch {
    return plain();
  }
  for (const code of clean.querySelectorAll("pre")) code.replaceWith(withCopy(code));
  for (const table of clean.querySelectorAll("table")) {
    const scrolled = document.createElement("div");
    scrolled.className = "wide";
    scrolled.tabIndex = 0;
    table.replaceWith(scrolled);
    scrolled.append(table);
  }
  return clean;
}

// A block of code under a line that names its language and offers to copy it.
function withCopy(code) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const head = document.createElement("figcaption");
  const language = document.createElement("span");
  language.textContent = code.dataset.language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this code");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(code.textContent)) ? "Copied" : "Cannot copy";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  head.append(language, button);
  // Scrolled by keys where it is wider than the page.
  code.tabIndex = 0;
  figure.append(head, code.cloneNode(true));
  return figure;
}

// Over plain HTTP from another machine browsers give no clipboard; selecting and copying works there.
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
