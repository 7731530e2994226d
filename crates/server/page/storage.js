// Conversations in the browser's own database. Lists are read from `summaries`, so that a start does not read all that was ever said.

const NAME = "sluice";
let opened = null;
// Where a browser has no database for us (some private windows): kept until the page is closed.
const memory = new Map();

// Other windows of this page are told what was changed.
const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel(NAME) : null;
export const onChange = (then) => channel?.addEventListener("message", ({ data }) => then(data));

function open() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("summaries", { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

const asked = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const summary = ({ id, title, created, updated }) => ({ id, title, created, updated });

export const isKept = async () => (await open()) !== null;

// Newest first.
export async function list() {
  const db = await open();
  const all = db ? await asked(db.transaction("summaries").objectStore("summaries").getAll()) : [...memory.values()].map(summary);
  return all.sort((a, b) => b.updated - a.updated);
}

export async function get(id) {
  const db = await open();
  return (db ? await asked(db.transaction("conversations").objectStore("conversations").get(id)) : memory.get(id)) ?? null;
}

export async function all() {
  const db = await open();
  return db ? asked(db.transaction("conversations").objectStore("conversations").getAll()) : [...memory.values()];
}

async function write(change, id) {
  const db = await open();
  if (!db) return;
  const transaction = db.transaction(["conversations", "summaries"], "readwrite");
  change(transaction.objectStore("conversations"), transaction.objectStore("summaries"));
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
  channel?.postMessage(id);
}

export function put(conversation) {
  memory.set(conversation.id, conversation);
  return write((conversations, summaries) => {
    conversations.put(conversation);
    summaries.put(summary(conversation));
  }, conversation.id);
}

export function remove(id) {
  memory.delete(id);
  return write((conversations, summaries) => {
    conversations.delete(id);
    summaries.delete(id);
  }, id);
}
