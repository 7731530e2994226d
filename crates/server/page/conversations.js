// A conversation is a tree of messages, since any of them can be written anew: the old one stays beside the new, with what followed. What is shown is the way
// from the first message to the `head`. Nothing here changes a conversation; each function gives another.
//
//   {id, title, named, created, updated, settings, messages: {id: message}, head}
//   message: {id, parent, role, content, reasoning?, created, model?, finish?, usage?, times?, failure?}
// `content` and `reasoning` are as they were received, so that a server finds what it wrote in its cache.

export const FORMAT = "sluice-conversations";
const VERSION = 1;
const TITLE = 60;

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");

export function begun(settings) {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, settings, messages: {}, head: null };
}

// The messages that are shown, first to last.
export function shown(conversation, head = conversation.head) {
  const way = [];
  for (let id = head; id !== null; id = conversation.messages[id].parent) way.push(conversation.messages[id]);
  return way.reverse();
}

export function added(conversation, message) {
  const messages = { ...conversation.messages, [message.id]: message };
  const title = conversation.title || (message.role === "user" ? titleFrom(message.content) : "");
  return { ...conversation, messages, title, head: message.id, updated: Date.now() };
}

export function changed(conversation, id, patch) {
  const messages = { ...conversation.messages, [id]: { ...conversation.messages[id], ...patch } };
  return { ...conversation, messages, updated: Date.now() };
}

// Without a message that nothing follows: an answer that failed before its first token.
export function without(conversation, id) {
  const { [id]: gone, ...messages } = conversation.messages;
  return { ...conversation, messages, head: conversation.head === id ? gone.parent : conversation.head };
}

// As the server is to see it.
export function forServer(messages) {
  return messages.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
}

// By parent: the messages that stand in the same place, oldest first.
export function places(conversation) {
  const found = new Map();
  for (const message of Object.values(conversation.messages)) {
    const there = found.get(message.parent);
    if (there) there.push(message);
    else found.set(message.parent, [message]);
  }
  found.forEach((there) => there.sort((a, b) => a.created - b.created));
  return found;
}

// Shows a message, and what followed it last.
export function turnedTo(conversation, id) {
  const found = places(conversation);
  let head = id;
  while (found.has(head)) head = found.get(head).at(-1).id;
  return { ...conversation, head };
}

export function titleFrom(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > TITLE ? `${line.slice(0, TITLE - 1).trimEnd()}…` : line;
}

export const exported = (conversations) => JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);

// The conversations of a file that somebody gives us. Throws what is wrong with it.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("this is not a JSON file");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("this file holds no conversations of Sluice");
  if (file.version !== VERSION) throw new Error(`this file has version ${file.version}; this page reads version ${VERSION}`);
  return file.conversations.map(checked);
}

const time = (value) => (Number.isFinite(value) ? value : Date.now());
const isText = (value) => typeof value === "string";

// Only what we know is taken over, and each message hangs on one that is there.
function checked(given, index) {
  const wrong = (what) => new Error(`conversation ${index + 1}: ${what}`);
  if (typeof given?.messages !== "object" || given.messages === null) throw wrong("it has no messages");
  const messages = {};
  for (const [id, m] of Object.entries(given.messages)) {
    const known = m && m.id === id && (m.role === "user" || m.role === "assistant") && isText(m.content);
    if (!known || (m.parent !== null && !Object.hasOwn(given.messages, m.parent))) throw wrong("a message is not what it should be");
    messages[id] = { id, parent: m.parent, role: m.role, content: m.content, created: time(m.created) };
    for (const name of ["reasoning", "model", "finish"]) if (isText(m[name])) messages[id][name] = m[name];
    if (m.usage && typeof m.usage === "object") messages[id].usage = numbers(m.usage, ["prompt", "cached", "generated"]);
    if (m.times && typeof m.times === "object") messages[id].times = numbers(m.times, ["sent", "first", "answer", "end"]);
  }
  // No message may be its own ancestor.
  const rooted = new Set();
  for (const id of Object.keys(messages)) {
    const way = new Set();
    for (let at = id; at !== null && !rooted.has(at); at = messages[at].parent) {
      if (way.has(at)) throw wrong("its messages follow each other in a circle");
      way.add(at);
    }
    way.forEach((at) => rooted.add(at));
  }
  const head = Object.hasOwn(messages, given.head) ? given.head : (Object.keys(messages).at(-1) ?? null);
  const title = isText(given.title) ? given.title.slice(0, 200) : "";
  const settings = cleanSettings(given.settings);
  return { id: newId(), title, named: given.named === true, created: time(given.created), updated: time(given.updated), settings, messages, head };
}

const numbers = (from, names) => Object.fromEntries(names.filter((n) => Number.isFinite(from[n])).map((n) => [n, from[n]]));

// How answers are made; what is null is left to the model.
export const SETTINGS = { system: "", temperature: null, top_p: null, max_tokens: null, seed: null, thinking: null };

export function cleanSettings(given) {
  const clean = { ...SETTINGS };
  if (isText(given?.system)) clean.system = given.system;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (Number.isFinite(given?.[name])) clean[name] = given[name];
  if (typeof given?.thinking === "boolean") clean.thinking = given.thinking;
  return clean;
}
