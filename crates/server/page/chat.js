// What the page knows, and what can be done with it. Components show `state` and call these functions; every change goes through `set`.
import * as server from "./answers.js";
import * as tree from "./conversations.js";
import { looked, parsed } from "./metrics.js";
import * as storage from "./storage.js";
import { split } from "./thinking.js";

const remembered = (name) => {
  try {
    return localStorage.getItem(`sluice-${name}`);
  } catch {
    return null;
  }
};
const remember = (name, value) => {
  try {
    if (value === null) localStorage.removeItem(`sluice-${name}`);
    else localStorage.setItem(`sluice-${name}`, value);
  } catch {
    // Not kept, then.
  }
};

function settingsUsedLast() {
  try {
    return tree.cleanSettings(JSON.parse(remembered("settings")));
  } catch {
    return tree.cleanSettings(null);
  }
}

export let state = {
  // Summaries of all conversations, newest first.
  list: [],
  current: tree.begun(settingsUsedLast()),
  // By conversation: the answer under way, {message, controller}.
  answers: new Map(),
  models: [],
  model: null,
  modelFailure: null,
  looks: [],
  looksFailure: null,
  key: sessionStorage.getItem("sluice-key") ?? "",
  theme: remembered("theme") ?? "system",
  tiersOpen: remembered("tiers") === "open" || (remembered("tiers") === null && matchMedia("(min-width: 80rem)").matches),
  sidebarOpen: false,
  settingsOpen: false,
  // The message that is being edited.
  editing: null,
  // One line at the foot: {words, undo?}.
  notice: null,
  // For those who hear the page.
  said: "",
  kept: true,
};

let changed = () => {};
export const onChange = (then) => (changed = then);

function set(patch) {
  state = { ...state, ...patch };
  changed(state);
}

// Conversations that are answered go on while another is shown.
const held = new Map();
const find = (id) => (state.current.id === id ? state.current : held.get(id));

function put(conversation) {
  if (state.answers.has(conversation.id)) held.set(conversation.id, conversation);
  if (state.current.id === conversation.id) set({ current: conversation });
}

async function save(conversation) {
  const { id, title, created, updated } = conversation;
  const list = [{ id, title, created, updated }, ...state.list.filter((c) => c.id !== id)].sort((a, b) => b.updated - a.updated);
  set({ list });
  try {
    await storage.put(conversation);
  } catch {
    notice("This conversation could not be kept: the browser's storage is full.");
  }
}

export function notice(words, undo = null) {
  const made = { words, undo };
  set({ notice: made });
  setTimeout(() => state.notice === made && set({ notice: null }), undo ? 10_000 : 5_000);
}
export const closeNotice = () => set({ notice: null });

// --- answers

export function send(text) {
  const { current } = state;
  const message = { id: tree.newId(), parent: current.head, role: "user", content: text, created: Date.now() };
  return answerIn(tree.added(current, message));
}

export function edit(id, text) {
  const { current, answers } = state;
  // Another message is being answered: the text stays in its field.
  if (answers.has(current.id)) return;
  const old = current.messages[id];
  const message = { id: tree.newId(), parent: old.parent, role: "user", content: text, created: Date.now() };
  set({ editing: null });
  return answerIn(tree.added(current, message));
}

export function regenerate(id) {
  const { current } = state;
  const old = current.messages[id];
  const isEmpty = !old.content && !old.reasoning;
  return answerIn(isEmpty ? tree.without(current, id) : { ...current, head: old.parent });
}

export const stop = () => state.answers.get(state.current.id)?.controller.abort();

// At most so often is an answer shown anew, and no longer is spent on it than on anything else.
const PACE = 40;
const SAVED_EVERY = 3_000;

async function answerIn(conversation) {
  const { id } = conversation;
  if (state.answers.has(id)) return;
  const asked = tree.forServer(tree.shown(conversation));
  const message = tree.newId();
  const sent = Date.now();
  const model = state.model?.id;
  conversation = tree.added(conversation, {
    ...{ id: message, parent: conversation.head, role: "assistant", content: "", created: sent },
    ...{ model, times: { sent } },
  });
  const controller = new AbortController();
  set({ current: conversation, answers: new Map(state.answers).set(id, { message, controller }), said: "Waiting for the first token." });
  held.set(id, conversation);
  // From its first message on, a conversation has an address: a reload shows it again.
  if (location.hash !== `#${id}`) history.replaceState(null, "", `#${id}`);
  save(conversation);
  look();

  let got = { content: "", reasoning: "" };
  let timer = null;
  let saved = Date.now();
  let patch = { times: { sent } };
  const flush = () => {
    timer = null;
    const begun = performance.now();
    put(tree.changed(find(id), message, { ...patch, content: got.content, ...(got.reasoning ? { reasoning: got.reasoning } : {}) }));
    pace = Math.max(PACE, 2 * (performance.now() - begun));
    if (Date.now() - saved > SAVED_EVERY) {
      saved = Date.now();
      save(find(id));
    }
  };
  let pace = 0;
  let failure = null;
  let stopped = false;
  try {
    for await (const part of server.answer({ messages: asked, settings: conversation.settings, model, key: state.key, signal: controller.signal })) {
      if (part.content || part.reasoning) {
        got.content += part.content ?? "";
        got.reasoning += part.reasoning ?? "";
        const now = Date.now();
        const first = patch.times.first ?? now;
        const isAnswer = patch.times.answer || split(got.content, got.reasoning).text !== "";
        patch = { ...patch, times: { ...patch.times, first, ...(isAnswer ? { answer: patch.times.answer ?? now } : {}) } };
      }
      if (part.finish) patch = { ...patch, finish: part.finish };
      if (part.usage) patch = { ...patch, usage: part.usage };
      timer ??= setTimeout(flush, pace);
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) failure = error instanceof server.Failure ? error : new server.Failure("server", `The page failed: ${error.message}`);
  }
  clearTimeout(timer);
  patch = { ...patch, times: { ...patch.times, end: Date.now() } };
  if (stopped) patch.finish = "stopped";
  if (failure) {
    const { kind, message: words, retryAfter } = failure;
    patch.failure = { kind, words, ...(retryAfter ? { retryAt: Date.now() + 1000 * retryAfter } : {}) };
  }
  flush();
  const done = find(id);
  const answers = new Map(state.answers);
  answers.delete(id);
  held.delete(id);
  set({ answers, said: failure ? "" : stopped ? "Stopped." : "The answer is complete." });
  if (!forgotten.delete(id)) await save(done);
}

// --- conversations

// Deleted while they were answered.
const forgotten = new Set();

function show(conversation) {
  set({ current: conversation, editing: null, sidebarOpen: false });
  const hash = Object.keys(conversation.messages).length > 0 ? `#${conversation.id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
}

export const begin = () => show(tree.begun(settingsUsedLast()));

export async function openNamed(id) {
  if (id === state.current.id) return set({ sidebarOpen: false });
  const found = held.get(id) ?? (await storage.get(id));
  if (found) show(found);
  else notice("This conversation is no longer there.");
}

export function rename(title) {
  const conversation = { ...state.current, title: title.trim() || state.current.title, named: true };
  put(conversation);
  return save(conversation);
}

export async function remove() {
  const gone = state.current;
  if (state.answers.has(gone.id)) forgotten.add(gone.id);
  stop();
  set({ list: state.list.filter((c) => c.id !== gone.id) });
  begin();
  await storage.remove(gone.id);
  notice(`“${gone.title}” was deleted.`, async () => {
    forgotten.delete(gone.id);
    await save(gone);
    set({ notice: null });
    show(gone);
  });
}

export function turnTo(id) {
  const conversation = tree.turnedTo(state.current, id);
  put(conversation);
  save(conversation);
}

export const setEditing = (id) => set({ editing: id });

export function changeSettings(patch) {
  const settings = tree.cleanSettings({ ...state.current.settings, ...patch });
  const conversation = { ...state.current, settings };
  remember("settings", JSON.stringify(settings));
  put(conversation);
  if (conversation.head !== null) save(conversation);
}

const FILE = "application/json";

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: FILE }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function exportCurrent() {
  const name = state.current.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
  download(`${name}.json`, tree.exported([state.current]));
}

export async function exportAll() {
  download(`sluice-conversations-${new Date().toISOString().slice(0, 10)}.json`, tree.exported(await storage.all()));
}

export async function importFile(file) {
  try {
    const conversations = tree.imported(await file.text());
    for (const conversation of conversations) await save(conversation);
    notice(conversations.length === 1 ? "One conversation was imported." : `${conversations.length} conversations were imported.`);
    if (conversations.length > 0) show(conversations[0]);
  } catch (error) {
    notice(`${file.name}: ${error.message}.`);
  }
}

// --- the page itself

export const openSettings = (settingsOpen) => set({ settingsOpen });
export const openSidebar = (sidebarOpen) => set({ sidebarOpen });

export function openTiers(tiersOpen) {
  remember("tiers", tiersOpen ? "open" : "closed");
  set({ tiersOpen });
  look();
}

export function setTheme(theme) {
  remember("theme", theme === "system" ? null : theme);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  set({ theme });
}

export function setModel(id) {
  remember("model", id);
  set({ model: state.models.find((m) => m.id === id) });
}

export function setKey(key) {
  if (key) sessionStorage.setItem("sluice-key", key);
  else sessionStorage.removeItem("sluice-key");
  set({ key });
  clearTimeout(asking);
  asking = setTimeout(askForModel, 400);
}

// --- the server

let asking = null;

async function askForModel() {
  clearTimeout(asking);
  try {
    const models = await server.models(state.key);
    set({ models, model: models.find((m) => m.id === remembered("model")) ?? models[0] ?? null, modelFailure: null });
  } catch (failure) {
    set({ modelFailure: { kind: failure.kind, words: failure.message } });
    if (failure.kind !== "key") asking = setTimeout(askForModel, failure.kind === "loading" ? 1_000 : 4_000);
  }
}

const LOOK_EVERY = 1_000;
let looking = false;

const isWaiting = () => [...state.answers].some(([id, { message }]) => !find(id)?.messages[message]?.times.first);

// While the figures are seen, or tell why an answer has not begun.
async function look() {
  if (looking) return;
  looking = true;
  while ((state.tiersOpen || isWaiting()) && !document.hidden) {
    const begun = performance.now();
    try {
      set({ looks: looked(state.looks, begun / 1000, parsed(await server.metrics(state.key))), looksFailure: null });
      if (!state.model && state.modelFailure?.kind === "lost") askForModel();
    } catch (failure) {
      set({ looksFailure: failure.message });
    }
    await new Promise((done) => setTimeout(done, LOOK_EVERY - Math.min(performance.now() - begun, LOOK_EVERY / 2)));
  }
  looking = false;
}

export async function start() {
  set({ kept: await storage.isKept(), list: await storage.list() });
  askForModel();
  look();
  document.addEventListener("visibilitychange", look);
  const fromAddress = async () => {
    const id = location.hash.slice(1);
    const found = id && (held.get(id) ?? (await storage.get(id)));
    if (found) set({ current: found, editing: null });
    else if (state.current.head !== null) begin();
  };
  addEventListener("popstate", fromAddress);
  await fromAddress();
  storage.onChange(async (id) => {
    set({ list: await storage.list() });
    const isMine = state.answers.has(id) || state.current.id !== id;
    const found = isMine ? null : await storage.get(id);
    if (found) set({ current: found });
  });
  addEventListener("pagehide", () => held.forEach((conversation) => storage.put(conversation)));
}
