// How answers are made in this conversation and in those begun after it, and the key for servers that want one.
import * as chat from "./chat.js";
import { grown } from "./composer.js";
import { html, useEffect, useRef } from "./html.js";

// [name, words, least, most, step]
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["max_tokens", "Tokens at most", 1, null, 1],
  ["seed", "Seed", 0, null, 1],
];
const THINKING = [[null, "As the model does"], [true, "On"], [false, "Off"]];

function Figure({ name, words, least, most, step, value }) {
  const onInput = (e) => {
    const given = e.target.value === "" ? null : Number(e.target.value);
    if (e.target.validity.valid) chat.changeSettings({ [name]: given });
  };
  return html`<label>
    <span>${words}</span>
    <input type="number" inputmode="decimal" min=${least} max=${most} step=${step === 1 ? 1 : "any"} value=${value ?? ""} placeholder="default" onInput=${onInput} />
  </label>`;
}

export function Settings({ settings, storedKey, model, models, failure }) {
  const dialog = useRef(null);
  const system = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    grown(system.current);
    if (failure?.kind === "key") dialog.current.querySelector("#key").focus();
  }, []);
  const close = () => dialog.current.close();
  return html`<dialog class="settings" ref=${dialog} aria-labelledby="settings" onClose=${() => chat.openSettings(false)} onClick=${(e) => e.target === dialog.current && close()}>
    <div class="inside">
      <div class="top">
        <h2 id="settings">Settings</h2>
        <button type="button" class="quiet" onClick=${close}>Close</button>
      </div>
      <p class="hint">They hold for this conversation and for those begun after it. What is left empty is the model's own.</p>
      ${models.length > 1 &&
      html`<label class="whole">
        <span>Model, for all conversations</span>
        <select onChange=${(e) => chat.setModel(e.target.value)}>
          ${models.map(({ id }) => html`<option value=${id} selected=${id === model?.id}>${id}</option>`)}
        </select>
      </label>`}
      <label class="whole">
        <span>System prompt</span>
        <textarea ref=${system} rows="3" value=${settings.system} onInput=${(e) => (grown(e.target), chat.changeSettings({ system: e.target.value }))}></textarea>
      </label>
      <div class="figures">
        ${NUMBERS.map(([name, words, least, most, step]) => html`<${Figure} ...${{ name, words, least, most, step, value: settings[name] }} />`)}
      </div>
      <label class="whole">
        <span>Thinking, where the model's template knows it</span>
        <select onChange=${(e) => chat.changeSettings({ thinking: THINKING[e.target.selectedIndex][0] })}>
          ${THINKING.map(([value, words]) => html`<option selected=${settings.thinking === value}>${words}</option>`)}
        </select>
      </label>
      <label class="whole">
        <span>API key</span>
        <input id="key" type="password" autocomplete="off" spellcheck="false" value=${storedKey} onInput=${(e) => chat.setKey(e.target.value.trim())} />
      </label>
      <p class="hint">${failure?.kind === "key" ? "This server wants a key." : "Only for servers that want one."} It is forgotten when this tab is closed.</p>
      ${model &&
      html`<dl class="facts">
        <div><dt>Model</dt><dd>${model.id}</dd></div>
        ${model.max_model_len && html`<div><dt>Context</dt><dd>${model.max_model_len.toLocaleString("en")} tokens</dd></div>`}
        ${model.created && html`<div><dt>Loaded</dt><dd>${new Date(1000 * model.created).toLocaleString("en")}</dd></div>`}
      </dl>`}
      <p class="hint">
        Nothing on this page comes from elsewhere. It contains${" "}
        ${["preact", "htm", "marked", "dompurify"].map(
          (name, i) => html`${i > 0 && ", "}<a href=${`page/vendor/LICENSE-${name}.txt`} target="_blank" rel="noopener noreferrer">${name}</a>`,
        )} (licences).
      </p>
    </div>
  </dialog>`;
}
