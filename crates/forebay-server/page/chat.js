// The chat: one conversation, kept in this browser.

import { events, KeyNeeded, request } from "./api.js";
import { element, render } from "./markdown.js";

const STORE = "forebay-chat";
const FIELDS = ["system", "temperature", "top_p", "max_tokens"];
const get = (id) => document.getElementById(id);

export function startChat({ askForKey }) {
  const saved = load();
  const messages = saved.messages;
  let running = null;

  for (const field of FIELDS) {
    get(field).value = saved[field] ?? "";
    get(field).addEventListener("input", save);
  }
  get("model").addEventListener("change", save);

  function save() {
    const state = { messages, model: get("model").value };
    for (const field of FIELDS) state[field] = get(field).value;
    try {
      localStorage.setItem(STORE, JSON.stringify(state));
    } catch {
      get("announce").textContent = "This browser has no room to keep the conversation.";
    }
  }

  function show() {
    get("messages").replaceChildren(...messages.map(nodeOf));
    if (!messages.length) get("messages").append(element("p", "empty", "No messages yet. Write one below."));
    scroll(true);
  }

  function nodeOf(message, index) {
    const node = element("article", `message ${message.role === "user" ? "user" : ""}`);
    node.append(element("p", "who", message.role === "user" ? "You" : message.model || "Model"));
    fill(node, message);
    const last = index === messages.length - 1 && message.role === "assistant";
    if (last && !running) node.append(foot(message));
    return node;
  }

  /** Shows a message's text. Nodes that stay the same are kept. */
  function fill(node, message) {
    if (message.reasoning && !node.thinking) {
      node.thinking = element("details", "thinking");
      node.thinking.append(element("summary", "", "Thinking"), element("div"));
      node.append(node.thinking);
    }
    if (node.thinking) node.thinking.lastChild.textContent = message.reasoning;
    if (!node.body) node.append((node.body = element("div", "body")));
    if (message.role === "user") node.body.textContent = message.content;
    else render(node.body, message.content);
    if (node.thinking) node.body.before(node.thinking);
    if (message.error && !node.failure) node.append((node.failure = element("p", "failure", message.error)));
  }

  function foot(message) {
    const node = element("div", "foot");
    const retry = element("button", "", "Retry");
    retry.addEventListener("click", () => {
      messages.pop();
      answer();
    });
    node.append(retry, element("span", "", message.note ?? ""));
    return node;
  }

  function scroll(always) {
    const box = get("messages");
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < 120;
    if (always || near) box.scrollTop = box.scrollHeight;
  }

  function body() {
    const sent = messages.filter((message) => !message.error || message.content);
    const list = sent.map(({ role, content }) => ({ role, content }));
    if (get("system").value.trim()) list.unshift({ role: "system", content: get("system").value });
    const wanted = { model: get("model").value, messages: list, stream: true, stream_options: { include_usage: true } };
    for (const field of FIELDS.slice(1)) {
      if (get(field).value !== "") wanted[field] = Number(get(field).value);
    }
    return wanted;
  }

  async function answer() {
    running = new AbortController();
    const wanted = body();
    const message = { role: "assistant", content: "", reasoning: "", model: wanted.model };
    messages.push(message);
    busy(true);
    show();
    const node = get("messages").lastChild;
    let drawn = false;
    const draw = () => {
      if (drawn) return;
      drawn = true;
      requestAnimationFrame(() => {
        drawn = false;
        fill(node, message);
        scroll(false);
      });
    };
    try {
      await receive(wanted, message, draw);
    } catch (error) {
      if (error.name === "AbortError") message.note = "Stopped";
      else message.error = error.message;
      if (error instanceof KeyNeeded) askForKey();
    }
    running = null;
    busy(false);
    save();
    show();
    get("announce").textContent = message.error ?? `Answer ${message.note === "Stopped" ? "stopped" : "complete"}.`;
  }

  async function receive(wanted, message, draw) {
    const options = { method: "POST", body: JSON.stringify(wanted), signal: running.signal };
    const started = performance.now();
    let first = null;
    for await (const event of events(await request("/v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const delta = choice?.delta ?? {};
      if (first === null && (delta.content || delta.reasoning_content)) first = performance.now();
      message.reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      if (choice?.finish_reason === "length") message.cut = true;
      if (event.usage) message.note = note(event.usage, first ?? started, message.cut);
      draw();
    }
  }

  function note(usage, first, cut) {
    const seconds = (performance.now() - first) / 1000;
    const tokens = usage.completion_tokens;
    const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    return `${tokens} tokens${rate}${cut ? ", cut at the token limit" : ""}`;
  }

  function busy(is) {
    get("send").hidden = is;
    get("stop").hidden = !is;
    get("new-chat").disabled = is;
  }

  const stop = () => running?.abort();

  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = get("prompt").value;
    const fields = FIELDS.slice(1).map(get);
    const wrong = fields.find((field) => !field.checkValidity());
    if (wrong) {
      get("settings").open = true;
      wrong.reportValidity();
      return;
    }
    if (!text.trim() || running) return;
    get("prompt").value = "";
    fit();
    messages.push({ role: "user", content: text });
    answer();
  });
  get("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    get("ask").requestSubmit();
  });
  get("prompt").addEventListener("input", fit);
  get("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  get("new-chat").addEventListener("click", () => {
    messages.length = 0;
    save();
    show();
    get("prompt").focus();
  });

  function fit() {
    get("prompt").rows = Math.min(8, get("prompt").value.split("\n").length);
  }

  show();
  return {
    setModels(names) {
      const before = get("model").value || saved.model;
      const options = names.map((name) => {
        const option = element("option", "", name);
        option.value = name;
        return option;
      });
      get("model").replaceChildren(...options);
      if (names.includes(before)) get("model").value = before;
    },
  };
}

/** Reads the conversation that this browser kept. */
function load() {
  try {
    const saved = JSON.parse(localStorage.getItem(STORE));
    if (Array.isArray(saved?.messages)) return saved;
  } catch {
    // What is kept is no conversation; a new one begins.
  }
  return { messages: [] };
}
