// All conversations, and what concerns all of them.
import * as chat from "./chat.js";
import { html, memo } from "./html.js";

const THEMES = [["system", "System"], ["light", "Light"], ["dark", "Dark"]];

const Entry = memo(({ id, title, isCurrent, isAnswering }) => html`<li>
  <button type="button" aria-current=${isCurrent ? "page" : null} title=${title} onClick=${() => chat.openNamed(id)}>
    <span>${title || "Without a name"}</span>
    ${isAnswering && html`<i class="busy" role="img" aria-label="is being answered"></i>`}
  </button>
</li>`);

function choose() {
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".json,application/json";
  input.addEventListener("change", () => input.files[0] && chat.importFile(input.files[0]));
  input.click();
}

export const Sidebar = memo(({ list, current, answers, theme, kept }) => html`<nav class="sidebar" aria-label="Conversations">
  <div class="brand"><span>Sluice</span></div>
  <button type="button" class="new" onClick=${chat.begin}>New conversation</button>
  <ul>
    ${list.map((c) => html`<${Entry} key=${c.id} id=${c.id} title=${c.title} isCurrent=${c.id === current} isAnswering=${answers.has(c.id)} />`)}
  </ul>
  ${!kept && html`<p class="hint">This browser keeps nothing for us: conversations are gone when the page is closed.</p>`}
  <div class="foot">
    <div class="row">
      <button type="button" class="quiet" onClick=${choose}>Import</button>
      <button type="button" class="quiet" disabled=${list.length === 0} onClick=${chat.exportAll}>Export all</button>
    </div>
    <fieldset class="switch">
      <legend class="off-screen">Colours</legend>
      ${THEMES.map(
        ([name, words]) => html`<label>
          <input type="radio" name="theme" value=${name} checked=${theme === name} onChange=${() => chat.setTheme(name)} /><span>${words}</span>
        </label>`,
      )}
    </fieldset>
  </div>
</nav>`);
