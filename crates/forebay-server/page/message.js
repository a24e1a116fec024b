// One message of a chat as a node, with the buttons that act on it.

import { parts } from "./highlight.js";
import { element, render } from "./markdown.js";
import { typeset } from "./math.js";
import { button, copy, fit } from "./ui.js";

const TOOLS = { copy, math: typeset, highlight };

function highlight(node, text, language) {
  const found = parts(text, language);
  if (found) node.replaceChildren(...found.map(([kind, part]) => (kind ? element("span", `code-${kind}`, part) : part)));
}

/** What is said of a question that has no answer. */
const LEFT_OUT = "Not part of the chat: later requests leave this message out. Edit it, delete it or retry.";

/**
 * Makes the node of a message. `actions` has `retry`, `goOn`, `edit(message, text, again)` and `remove`. `update(message, about)` shows
 * what changed; `about` says if the message is the chat's `last` one, if the chat is `busy`, and if the message is `leftOut` of requests.
 */
export function messageView(first, actions) {
  const user = first.role === "user";
  const node = element("article", `message${user ? " user" : ""}`);
  const who = element("p", "who");
  const body = element("div", "body");
  const end = element("div");
  node.append(who, body, end);
  let message = first;
  let thinking = null;
  let form = null;
  let shown = "";

  function update(now, about) {
    message = now;
    who.textContent = user ? "You" : message.model || "Model";
    const answering = message.state === "answering";
    if (message.reasoning && !thinking) {
      thinking = element("details", "thinking");
      thinking.append(element("summary", "", "Thinking"), element("div"));
      body.before(thinking);
    }
    if (thinking) thinking.hidden = !message.reasoning;
    if (thinking && thinking.lastChild.textContent !== message.reasoning) thinking.lastChild.textContent = message.reasoning;
    if (!user) render(body, message.content, { tools: TOOLS, growing: answering });
    else if (body.textContent !== message.content) body.textContent = message.content;
    node.setAttribute("aria-busy", String(answering));
    node.classList.toggle("out", about.leftOut);
    const state = JSON.stringify([message.state, message.error, message.note, message.content === "", about]);
    if (state !== shown) ending(about);
    shown = state;
  }

  /** Shows what went wrong, and the buttons. */
  function ending(about) {
    const answering = message.state === "answering";
    end.replaceChildren();
    if (message.error) end.append(element("p", "failure", message.error));
    if (about.leftOut) end.append(element("p", "left-out", LEFT_OUT));
    if (answering && about.elsewhere) end.append(element("p", "left-out", "Another tab receives this answer."));
    if (!answering) end.append(buttons(about));
  }

  function buttons({ last, busy }) {
    const bar = element("div", last && !user ? "acts foot" : "acts");
    const free = !busy;
    if (!user && last && free) {
      const open = message.content && ["cut", "stopped", "limit"].includes(message.state);
      if (open) bar.append(button("Continue", () => actions.goOn(message)));
      bar.append(button("Retry", () => actions.retry(message)));
    }
    if (message.content) {
      const copying = button("Copy", () => copy(copying, message.content));
      bar.append(copying);
    }
    if (free && message.content) bar.append(button("Edit", edit));
    if (free) bar.append(button("Delete", () => actions.remove(message)));
    bar.append(element("span", "", message.note));
    return bar;
  }

  function edit() {
    if (form) return;
    form = element("form", "edit");
    const area = element("textarea");
    area.value = message.content;
    area.setAttribute("aria-label", "Text of the message");
    const close = () => {
      form.remove();
      form = null;
      body.hidden = end.hidden = false;
    };
    const save = (again) => {
      if (!area.value.trim()) return area.focus();
      const text = area.value;
      close();
      actions.edit(message, text, again);
    };
    const main = element("button", "main", user ? "Send again" : "Save");
    const row = element("div", "row");
    row.append(main);
    if (user) row.append(button("Save only", () => save(false)));
    row.append(button("Cancel", close));
    form.append(area, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save(user);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    area.addEventListener("input", () => fit(area));
    body.hidden = end.hidden = true;
    node.append(form);
    fit(area);
    area.focus();
  }

  return { node, update };
}
