// The page as a whole: what stands where, and what keys do.
import * as chat from "./chat.js";
import { Composer } from "./composer.js";
import { shown } from "./conversations.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { Log } from "./log.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Tiers } from "./tiers.js";

const drafts = new Map();

function Title({ conversation }) {
  const [renaming, setRenaming] = useState(false);
  const field = useRef(null);
  useEffect(() => setRenaming(false), [conversation.id]);
  useEffect(() => field.current?.select(), [renaming]);
  const done = (keep) => {
    if (keep && field.current) chat.rename(field.current.value);
    setRenaming(false);
  };
  if (renaming) {
    return html`<input
      class="title"
      ref=${field}
      aria-label="Name of this conversation"
      maxlength="200"
      value=${conversation.title}
      onBlur=${() => done(true)}
      onKeyDown=${(e) => {
        if (e.key === "Enter" && !e.isComposing) done(true);
        if (e.key === "Escape") done(false);
        e.stopPropagation();
      }}
    />`;
  }
  const isNew = conversation.head === null;
  const actions = () => html`
    <button type="button" class="quiet" onClick=${() => setRenaming(true)}>Rename</button>
    <button type="button" class="quiet" onClick=${chat.exportCurrent}>Export</button>
    <button type="button" class="quiet" onClick=${chat.remove}>Delete</button>
  `;
  return html`<h1 class="title">${isNew ? "New conversation" : conversation.title}</h1>
    ${!isNew &&
    html`<div class="actions" role="group" aria-label="This conversation">${actions()}</div>
      <button type="button" class="quiet more" popovertarget="more" aria-label="More for this conversation">More</button>
      <div id="more" popover onClick=${(e) => e.currentTarget.hidePopover()}>${actions()}</div>`}`;
}

function App({ state }) {
  const { current, answers, model, modelFailure } = state;
  const answering = answers.get(current.id) ?? null;
  const messages = shown(current);
  const composer = useRef(null);

  useEffect(() => {
    document.title = current.title ? `${current.title} – Sluice` : "Sluice";
  }, [current.title]);
  useEffect(() => {
    // A keyboard that comes up unasked hides half of a phone.
    if (matchMedia("(hover: hover)").matches) composer.current?.focus();
  }, [current.id]);

  // What lies over the page on small screens is where keys go next.
  useEffect(() => state.sidebarOpen && document.querySelector(".sidebar .new").focus(), [state.sidebarOpen]);
  const wasOpen = useRef(state.tiersOpen);
  useEffect(() => {
    if (state.tiersOpen && !wasOpen.current) document.querySelector(".tiers button").focus();
    wasOpen.current = state.tiersOpen;
  }, [state.tiersOpen]);

  useEffect(() => {
    const onKey = (e) => {
      if (e.key !== "Escape" || e.defaultPrevented || state.settingsOpen) return;
      if (state.editing) chat.setEditing(null);
      else if (answering) chat.stop();
      else if (state.sidebarOpen) chat.openSidebar(false);
      else if (state.tiersOpen && !matchMedia("(min-width: 64rem)").matches) chat.openTiers(false);
      else return;
      e.preventDefault();
      composer.current?.focus();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });

  const facts = model ? `${model.id}${model.max_model_len ? ` · ${model.max_model_len.toLocaleString("en")} tokens of context` : ""}` : "";
  return html`
    <a class="skip" href="#message" onClick=${(e) => (e.preventDefault(), composer.current?.focus())}>Go to the message</a>
    <div class=${`page ${state.tiersOpen ? "with-tiers" : ""} ${state.sidebarOpen ? "with-sidebar" : ""}`}>
      <${Sidebar} list=${state.list} current=${current.id} answers=${answers} theme=${state.theme} kept=${state.kept} />
      ${(state.sidebarOpen || state.tiersOpen) &&
      html`<div class="veil" onClick=${() => (chat.openSidebar(false), chat.openTiers(false))}></div>`}
      <main>
        <header>
          <button type="button" class="quiet menu" aria-expanded=${state.sidebarOpen} onClick=${() => chat.openSidebar(!state.sidebarOpen)}>Menu</button>
          <${Title} conversation=${current} />
          <div class="actions page-actions">
            <button type="button" class="quiet" onClick=${() => chat.openSettings(true)}>Settings</button>
            <button type="button" class="quiet" aria-pressed=${state.tiersOpen} onClick=${() => chat.openTiers(!state.tiersOpen)}>Tiers</button>
          </div>
        </header>
        <${Log}
          id=${current.id}
          messages=${messages}
          conversation=${current}
          answering=${answering?.message ?? null}
          editing=${state.editing}
          looks=${answering ? state.looks : null}
          facts=${facts}
          modelFailure=${modelFailure}
        />
        <${Composer}
          key=${current.id}
          field=${composer}
          drafts=${drafts}
          id=${current.id}
          isAnswering=${answering !== null}
          last=${messages.findLast((m) => m.role === "user")?.id ?? null}
          model=${model}
          used=${messages.findLast((m) => m.usage)?.usage ?? null}
        />
      </main>
      ${state.tiersOpen && html`<${Tiers} looks=${state.looks} failure=${state.looksFailure} model=${model} />`}
    </div>
    ${state.settingsOpen && html`<${Settings} settings=${current.settings} storedKey=${state.key} model=${model} models=${state.models} failure=${modelFailure} />`}
    <div class="notice" role="status">
      ${state.notice &&
      html`<p>
        <span>${state.notice.words}</span>
        ${state.notice.undo && html`<button type="button" class="quiet" onClick=${state.notice.undo}>Undo</button>`}
        <button type="button" class="quiet" onClick=${chat.closeNotice}>Close</button>
      </p>`}
    </div>
    <div class="off-screen" role="status" aria-live="polite">${state.said}</div>
  `;
}

const root = document.getElementById("page");
chat.onChange((state) => render(html`<${App} state=${state} />`, root));
chat.start();
