// Where messages are written: Enter sends, Shift-Enter begins a line.
import * as chat from "./chat.js";
import { html, useLayoutEffect, useState } from "./html.js";

const GROWS = CSS.supports("field-sizing", "content");

// A text field as high as its text.
export function grown(element) {
  if (!element || GROWS) return;
  element.style.height = "auto";
  element.style.height = `${element.scrollHeight + 2}px`;
}

// On screens without a keyboard there is no Shift-Enter: Enter is a line there, and the button sends.
export const sends = (e) => e.key === "Enter" && !e.shiftKey && !e.isComposing && matchMedia("(hover: hover)").matches;

export function Composer({ field, drafts, id, isAnswering, last, model, used }) {
  const [text, setText] = useState(drafts.get(id) ?? "");
  useLayoutEffect(() => grown(field.current), [text]);
  const change = (value) => {
    drafts.set(id, value);
    setText(value);
  };
  const submit = () => {
    if (isAnswering || text.trim() === "") return;
    chat.send(text.trim());
    change("");
    field.current.focus();
  };
  const onKeyDown = (e) => {
    if (sends(e)) {
      e.preventDefault();
      submit();
    } else if (e.key === "ArrowUp" && text === "" && last && !isAnswering) {
      e.preventDefault();
      chat.setEditing(last);
    }
  };
  const most = model?.max_model_len;
  const total = used ? used.prompt + (used.generated ?? 0) : 0;
  return html`<div class="composer">
    <div class="field">
      <textarea
        id="message"
        ref=${field}
        rows="1"
        aria-label="Message"
        aria-describedby="keys"
        placeholder="Write a message"
        enterkeyhint="enter"
        value=${text}
        onInput=${(e) => change(e.target.value)}
        onKeyDown=${onKeyDown}
      ></textarea>
      ${isAnswering
        ? html`<button type="button" class="main" onClick=${chat.stop}>Stop</button>`
        : html`<button type="button" class="main" disabled=${text.trim() === ""} onClick=${submit}>Send</button>`}
    </div>
    <p class="under">
      <span id="keys" class="keys">${isAnswering ? "Esc stops" : "Enter sends, Shift+Enter begins a line"}</span>
      ${most && total > 0 && html`<span class="used">${total.toLocaleString("en")} of ${most.toLocaleString("en")} tokens used</span>`}
    </p>
  </div>`;
}
