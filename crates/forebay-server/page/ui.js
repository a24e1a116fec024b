// Small parts that the page's modules share: buttons, notices, copies and downloads.

import { element } from "./markdown.js";

export const get = (id) => document.getElementById(id);

export function button(label, work, name = "") {
  const node = element("button", name, label);
  node.type = "button";
  node.addEventListener("click", work);
  return node;
}

/** Tells a screen reader something that others see. */
export function announce(text) {
  get("announce").textContent = text;
}

/** Shows a notice above the chat. Actions are pairs of a label and what to do. A notice with the same name takes its place. */
export function notice(name, text, actions = []) {
  endNotice(name);
  const node = element("div", "notice");
  node.dataset.name = name;
  node.append(element("p", "", text));
  for (const [label, work] of actions) {
    node.append(button(label, () => {
      node.remove();
      work();
    }));
  }
  const close = button("×", () => node.remove(), "plain");
  close.setAttribute("aria-label", "Close this notice");
  node.append(close);
  get("notices").append(node);
}

const noticeOf = (name) => get("notices").querySelector(`[data-name="${name}"]`);

export function isNotice(name) {
  return noticeOf(name) !== null;
}

export function endNotice(name) {
  noticeOf(name)?.remove();
}

/** Copies text, and says on the button whether that worked. */
export async function copy(node, text) {
  const label = (node.label ??= node.textContent);
  node.textContent = (await toClipboard(text)) ? "Copied" : "Not allowed";
  clearTimeout(node.later);
  node.later = setTimeout(() => (node.textContent = label), 1500);
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS, browsers have only the old way.
    const area = element("textarea", "unseen");
    area.value = text;
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return copied;
  }
}

/** Saves text as a file of the user. */
export function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Makes a textarea as tall as its text, up to the most that the style allows. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
