// The server's figures: /metrics is Prometheus' text, counters only grow, and rates are differences between two looks at them.

// name{labels} -> value, histograms' buckets left out.
export function parsed(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(\{[^}]*\})? (\S+)/.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const value = Number(match[3]);
    if (Number.isFinite(value)) values.set(match[1] + (match[2] ?? ""), value);
  }
  return values;
}

const KEPT = 90;
// Hit rates are of the last so many seconds, where anything was asked for.
const RECENT = 20;

// Looks at the figures, oldest first: [{at (seconds), values}]. Gives another list.
export function looked(looks, at, values) {
  const before = looks.at(-1);
  // Counters that fall tell of another server.
  const restarted = before && (values.get("vllm:prompt_tokens_total") ?? 0) < (before.values.get("vllm:prompt_tokens_total") ?? 0);
  return [...(restarted ? [] : looks), { at, values }].slice(-KEPT);
}

export const value = (looks, name) => looks.at(-1)?.values.get(name) ?? 0;

// Growth per second between neighbouring looks, oldest first.
export function rates(looks, name) {
  const out = [];
  for (let i = 1; i < looks.length; i++) {
    const [a, b] = [looks[i - 1], looks[i]];
    const grown = (b.values.get(name) ?? 0) - (a.values.get(name) ?? 0);
    out.push(Math.max(0, grown) / Math.max(b.at - a.at, 0.001));
  }
  return out;
}

export const series = (looks, name) => looks.map((look) => look.values.get(name) ?? 0);

// How much of `whole` was `part`: recently where something happened, else since the start; null where nothing ever did.
export function share(looks, part, whole) {
  const last = looks.at(-1);
  if (!last) return null;
  const from = looks.find((look) => last.at - look.at <= RECENT) ?? last;
  const grown = (name) => (last.values.get(name) ?? 0) - (from.values.get(name) ?? 0);
  if (grown(whole) > 0) return { share: grown(part) / grown(whole), recent: true };
  const all = last.values.get(whole) ?? 0;
  return all > 0 ? { share: (last.values.get(part) ?? 0) / all, recent: false } : null;
}

// A histogram's mean, in the same way.
export const mean = (looks, name) => share(looks, `${name}_sum`, `${name}_count`);
