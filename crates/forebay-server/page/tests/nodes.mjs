// The few nodes that the tests need in place of a browser's.

class Node {
  childNodes = [];
  className = "";
  listeners = {};

  constructor(tag) {
    this.tagName = tag.toUpperCase();
    document.made++;
  }

  append(...nodes) {
    this.childNodes.push(...nodes);
  }

  addEventListener(kind, listener) {
    this.listeners[kind] = listener;
  }

  get lastChild() {
    return this.childNodes.length ? { remove: () => this.childNodes.pop() } : null;
  }

  get textContent() {
    return this.childNodes.map((node) => (typeof node === "string" ? node : node.textContent)).join("");
  }

  set textContent(text) {
    this.childNodes = text ? [text] : [];
  }
}

globalThis.document = { made: 0, createElement: (tag) => new Node(tag) };

const SHOWN = ["href", "start", "checked"];
const escaped = (text) => text.replace(/[&<>]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[char]);

/** Writes what is inside a node, for comparisons. */
export function written(node) {
  let text = "";
  const stack = [...node.childNodes].reverse();
  while (stack.length) {
    const one = stack.pop();
    if (one.close) text += one.close;
    else if (typeof one === "string") text += escaped(one);
    else {
      const tag = one.tagName.toLowerCase();
      const values = SHOWN.filter((name) => one[name] !== undefined).map((name) => ` ${name}="${one[name]}"`);
      text += `<${tag}${one.className ? ` class="${one.className}"` : ""}${values.join("")}>`;
      stack.push({ close: `</${tag}>` }, ...[...one.childNodes].reverse());
    }
  }
  return text;
}
