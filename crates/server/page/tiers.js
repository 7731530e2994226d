// Where weights, states and prompts are, and how fast they move: pictures of the server's figures.
import * as chat from "./chat.js";
import { html } from "./html.js";
import { mean, rates, series, share, value } from "./metrics.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 999.5 && unit < UNITS.length - 1) [n, unit] = [n / 1000, unit + 1];
  return `${unit === 0 || n >= 99.5 ? Math.round(n) : n.toPrecision(n < 9.95 ? 2 : 3)} ${UNITS[unit]}`;
}

const figure = (n) => (n >= 99.5 ? Math.round(n).toLocaleString("en") : n.toFixed(1).replace(/\.0$/, ""));
const percent = (part) => `${Math.round(100 * part)} %`;
const time = (s) => (s < 0.9995 ? `${(1000 * s).toFixed(s < 0.00995 ? 1 : 0)} ms` : `${s.toFixed(1)} s`);

const [W, H] = [280, 36];

// A line over time, newest at the right; `most` is written beside it.
function Line({ values, words, most = Math.max(...values, 0) }) {
  const top = most || 1;
  const step = W / 89;
  const left = W - step * (values.length - 1);
  const at = (v, i) => `${(left + i * step).toFixed(1)} ${(H - 1.5 - (H - 3) * Math.min(v / top, 1)).toFixed(1)}`;
  const line = values.length > 1 ? `M${values.map(at).join("L")}` : "";
  return html`<svg class="line" viewBox="0 0 ${W} ${H}" preserveAspectRatio="none" role="img" aria-label=${words}>
    ${line && html`<path class="area" d="${line}L${W} ${H}L${left.toFixed(1)} ${H}Z" /><path class="stroke" d=${line} />`}
  </svg>`;
}

// Parts of a whole side by side: [words, amount, said, colour].
function Bar({ parts, words }) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  let x = 0;
  return html`<svg class="bar" viewBox="0 0 ${W} 10" preserveAspectRatio="none" role="img" aria-label=${words}>
      <rect class="rest" width=${W} height="10" />
      ${parts.map(([, amount, , colour]) => {
        const width = total > 0 ? (W * amount) / total : 0;
        const from = x;
        x += width;
        return html`<rect class=${`part-${colour}`} x=${from.toFixed(2)} width=${Math.max(width, amount > 0 ? 1 : 0).toFixed(2)} height="10" />`;
      })}
    </svg>
    <ul class="legend">
      ${parts.map(([name, , said, colour]) => html`<li><i class=${`part-${colour}`} aria-hidden="true"></i>${name}<b>${said}</b></li>`)}
    </ul>`;
}

const Pair = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

const MEMORY = [
  ["weights_mapped", "Weights, mapped"],
  ["weights_copied", "Weights, copied"],
  ["experts", "Experts"],
  ["kv", "Keys and values"],
  ["state", "States"],
  ["scratch", "Scratch"],
];

function Speed({ looks }) {
  const [generated, computed] = [rates(looks, "vllm:generation_tokens_total"), rates(looks, "sluice:prompt_tokens_computed_total")];
  const [first, between] = [mean(looks, "vllm:time_to_first_token_seconds"), mean(looks, "vllm:inter_token_latency_seconds")];
  const most = Math.max(...generated, 0);
  return html`<section>
    <h3>Tokens <span>written, each second</span></h3>
    <div class="big"><b>${figure(generated.at(-1) ?? 0)}</b> now<span>${most > 0 ? `at most ${figure(most)}` : ""}</span></div>
    <${Line} values=${generated} words="Tokens written each second over the last minute and a half" />
    <dl>
      <${Pair} name="Prompts computed">${figure(computed.at(-1) ?? 0)} tokens/s<//>
      ${first && html`<${Pair} name="First token">${time(first.share)}<//>`}
      ${between && html`<${Pair} name="Between tokens">${time(between.share)}<//>`}
    </dl>
  </section>`;
}

function Requests({ looks }) {
  const [running, waiting] = ["vllm:num_requests_running", "vllm:num_requests_waiting"].map((name) => value(looks, name));
  const refused = value(looks, "sluice:requests_refused_total");
  return html`<section>
    <h3>Requests</h3>
    <div class="big"><b>${running}</b> running<b>${waiting}</b> waiting</div>
    <${Line} values=${series(looks, "vllm:num_requests_running")} words="Requests running over the last minute and a half" />
    ${refused > 0 && html`<dl><${Pair} name="Refused, queue full">${refused.toLocaleString("en")}<//></dl>`}
  </section>`;
}

function Memory({ looks }) {
  const of = (name) => value(looks, `sluice:memory_bytes{class="${name}"}`);
  const parts = MEMORY.map(([name, words], i) => [words, of(name), bytes(of(name)), i]).filter(([, amount]) => amount > 0);
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  if (total === 0) return null;
  return html`<section>
    <h3>Memory <span>${value(looks, "sluice:memory_shared") ? "of processor and GPU" : "set aside at the start"}</span></h3>
    <div class="big"><b>${bytes(total)}</b></div>
    <${Bar} parts=${parts} words=${`Memory by class, ${bytes(total)} in all`} />
  </section>`;
}

function Cache({ looks }) {
  const usage = value(looks, "vllm:kv_cache_usage_perc");
  const states = value(looks, "sluice:states_in_use");
  const [snapshots, evicted] = [value(looks, "sluice:state_snapshots"), value(looks, "sluice:prefix_blocks_evicted_total")];
  return html`<section>
    <h3>Keys and values</h3>
    <div class="big"><b>${percent(usage)}</b> of the blocks in use</div>
    <${Line} values=${series(looks, "vllm:kv_cache_usage_perc")} most=${1} words="Share of the blocks in use over the last minute and a half" />
    <dl>
      <${Pair} name="Kept for prompts to come">${bytes(value(looks, "sluice:prefix_bytes"))}<//>
      ${(states > 0 || snapshots > 0) && html`<${Pair} name="States in use, kept">${states}, ${snapshots}<//>`}
      ${evicted > 0 && html`<${Pair} name="Blocks given up">${evicted.toLocaleString("en")}<//>`}
    </dl>
  </section>`;
}

function Prompts({ looks }) {
  const hits = share(looks, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total");
  if (!hits) return null;
  const parts = [["From memory", "memory"], ["From disk", "disk"], ["Computed", "computed"]].map(([words, name], i) => {
    const tokens = value(looks, `sluice:prompt_tokens_${name}_total`);
    return [words, tokens, tokens.toLocaleString("en"), i];
  });
  return html`<section>
    <h3>Tokens of prompts</h3>
    <div class="big"><b>${percent(hits.share)}</b> were there${hits.recent ? ", just now" : ""}</div>
    <${Bar} parts=${parts} words="Where tokens of prompts came from, since the start" />
  </section>`;
}

function Experts({ looks }) {
  const hits = share(looks, "sluice:experts_hit_total", "sluice:experts_wanted_total");
  if (!hits) return null;
  const read = rates(looks, "sluice:experts_read_bytes_total");
  return html`<section>
    <h3>Experts <span>streamed from disk</span></h3>
    <div class="big"><b>${percent(hits.share)}</b> were in memory${hits.recent ? ", just now" : ""}</div>
    <${Line} values=${read} words="Bytes of experts read each second over the last minute and a half" />
    <dl>
      <${Pair} name="Reading">${bytes(read.at(-1) ?? 0)}/s<//>
      <${Pair} name="Read since the start">${bytes(value(looks, "sluice:experts_read_bytes_total"))}<//>
    </dl>
  </section>`;
}

function Disk({ looks }) {
  const of = (name) => value(looks, `sluice:prompt_cache_${name}`);
  const isThere = ["bytes", "blocks", "written_bytes", "read_bytes", "broken"].some((name) => of(name) > 0);
  if (!isThere) return null;
  const [read, written] = ["read", "written"].map((name) => rates(looks, `sluice:prompt_cache_${name}_bytes`));
  return html`<section>
    <h3>Prompt cache <span>on disk</span></h3>
    <div class="big"><b>${bytes(of("bytes"))}</b> in ${of("blocks").toLocaleString("en")} blocks</div>
    <${Line} values=${read.map((r, i) => r + written[i])} words="Bytes read and written each second over the last minute and a half" />
    <dl>
      <${Pair} name="Reading">${bytes(read.at(-1) ?? 0)}/s, ${bytes(of("read_bytes"))} in all<//>
      <${Pair} name="Writing">${bytes(written.at(-1) ?? 0)}/s, ${bytes(of("written_bytes"))} in all<//>
      ${of("prefetched") > 0 && html`<${Pair} name="Read ahead">${of("prefetched").toLocaleString("en")} tokens<//>`}
      ${of("dropped") > 0 && html`<${Pair} name="Blocks not written">${of("dropped").toLocaleString("en")}<//>`}
      ${of("wrong") > 0 && html`<${Pair} name="Blocks found damaged">${of("wrong").toLocaleString("en")}<//>`}
    </dl>
    ${of("broken") > 0 && html`<p class="remark">An error has ended its use; the server's log says which.</p>`}
  </section>`;
}

function Model({ model }) {
  return html`<section>
    <h3>Model</h3>
    <dl>
      <${Pair} name="Name">${model.id}<//>
      ${model.max_model_len && html`<${Pair} name="Context">${model.max_model_len.toLocaleString("en")} tokens<//>`}
      ${model.created && html`<${Pair} name="Loaded">${new Date(1000 * model.created).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })}<//>`}
    </dl>
  </section>`;
}

const SECTIONS = [Speed, Requests, Experts, Prompts, Cache, Memory, Disk];

export function Tiers({ looks, failure, model }) {
  return html`<aside class="tiers" aria-label="Tiers" tabindex="-1">
    <div class="top">
      <h2>Tiers</h2>
      <button type="button" class="quiet" onClick=${() => chat.openTiers(false)}>Close</button>
    </div>
    ${failure && html`<p class="remark">${failure}</p>`}
    ${looks.length > 0 && SECTIONS.map((Section) => html`<${Section} looks=${looks} />`)}
    ${model && html`<${Model} model=${model} />`}
  </aside>`;
}
