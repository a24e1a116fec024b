// Chats and messages as records: what a valid one is, and how they become requests and files.

export const FORMAT = "forebay-chats";
/** Longer titles are cut. */
const TITLE_MAX = 80;
/**
 * `limit` ended at the most tokens, `stopped` by the user, `cut` by a fault or a closed page; `refused` has no text. Only an `answering`
 * message has an owner: the tab that receives it.
 */
const STATES = ["done", "answering", "limit", "stopped", "cut", "refused"];

/** Makes an id. Two tabs never make the same one. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newChat(text = "") {
  const now = Date.now();
  return { id: newId(), title: titleOf(text), created: now, updated: now };
}

export function newMessage(chat, role, content, more = {}) {
  return { id: newId(), chat, order: 0, role, content, reasoning: "", model: "", note: "", error: "", state: "done", owner: "", created: Date.now(), ...more };
}

/** Makes a title of a chat's first message. */
export function titleOf(text) {
  const line = text.trim().slice(0, 4 * TITLE_MAX).replace(/\s+/g, " ");
  if (!line) return "New chat";
  const chars = [...line];
  return chars.length > TITLE_MAX ? `${chars.slice(0, TITLE_MAX - 1).join("")}…` : line;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isId = (value) => typeof value === "string" && value !== "" && value.length <= 100;
const time = (value) => (Number.isFinite(value) ? value : Date.now());
const text = (value) => (typeof value === "string" ? value : "");

/** Returns why a value is no chat, or an empty text. */
export function chatFault(value) {
  if (!isObject(value)) return "it is no object";
  if (!isId(value.id)) return "it has no id";
  return typeof value.title === "string" ? "" : "it has no title";
}

/** Returns why a value is no message, or an empty text. */
export function messageFault(value) {
  if (!isObject(value)) return "it is no object";
  if (!isId(value.id)) return "it has no id";
  if (!isId(value.chat)) return "it belongs to no chat";
  if (!Number.isFinite(value.order)) return "it has no place in its chat";
  return contentFault(value);
}

function contentFault(value) {
  if (!isObject(value)) return "it is no object";
  if (value.role !== "user" && value.role !== "assistant") return "its role is neither user nor assistant";
  return typeof value.content === "string" ? "" : "it has no text";
}

/** Fills what a valid chat lacks. */
export function fullChat(value) {
  return { id: value.id, title: value.title, created: time(value.created), updated: time(value.updated), model: text(value.model) };
}

/** Fills what a valid message lacks. */
export function fullMessage(value) {
  const more = {};
  for (const field of ["reasoning", "model", "note", "error", "owner"]) more[field] = text(value[field]);
  const state = STATES.includes(value.state) ? value.state : !more.error ? "done" : value.content ? "cut" : "refused";
  return { id: value.id, chat: value.chat, order: value.order, role: value.role, content: value.content, ...more, state, created: time(value.created) };
}

/**
 * Returns the messages of a request that is to be answered after `messages`. A question that was refused is left out with its answer, so
 * that a message that is too long does not stop the chat; only the last question is sent in any case.
 */
export function sent(messages, system = "") {
  const list = [];
  messages.forEach((message, index) => {
    const next = messages[index + 1];
    const unanswered = next && next.role === "assistant" && !next.content;
    if (message.role === "user" ? !unanswered : message.content) list.push({ role: message.role, content: message.content });
  });
  if (system.trim()) list.unshift({ role: "system", content: system });
  return list;
}

/** Returns true if a message is no part of later requests. */
export function isLeftOut(messages, index) {
  const next = messages[index + 1];
  return messages[index].role === "user" && next?.role === "assistant" && !next.content && next.state !== "answering";
}

const date = (value) => new Date(value).toISOString();

/** Writes chats as a file that `parseFile` reads. `chats` has pairs of a chat and its messages. */
export function toJson(chats) {
  const list = chats.map(([chat, messages]) => ({
    title: chat.title,
    created: date(chat.created),
    messages: messages.map((message) => {
      const made = { role: message.role, content: message.content, created: date(message.created) };
      for (const field of ["reasoning", "model", "note", "error"]) if (message[field]) made[field] = message[field];
      if (message.state !== "done") made.state = message.state === "answering" ? "cut" : message.state;
      return made;
    }),
  }));
  return `${JSON.stringify({ format: FORMAT, version: 1, chats: list }, null, 1)}\n`;
}

/** Writes a chat for people to read. */
export function toMarkdown(chat, messages) {
  const parts = [`# ${chat.title}`];
  for (const message of messages) {
    parts.push(`## ${message.role === "user" ? "You" : message.model || "Model"}`);
    if (message.reasoning) parts.push(`<details><summary>Thinking</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
    if (message.content) parts.push(message.content.trim());
    if (message.error || message.state === "stopped") parts.push(`*${message.error || "Stopped."}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/**
 * Reads a file of chats: this page's, a list of messages, or an object with `messages`. Returns chats with new ids, so that none
 * replaces another, and what could not be read. Throws an error if the file has no chats at all.
 */
export function parseFile(file) {
  let value;
  try {
    value = JSON.parse(file);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const list = Array.isArray(value) ? [{ messages: value }] : Array.isArray(value?.chats) ? value.chats : Array.isArray(value?.messages) ? [value] : null;
  if (!list) throw new Error("The file has no chats: it needs `chats` or `messages`.");
  if (value.format === FORMAT && value.version !== 1) throw new Error(`The file has version ${value.version} of the format. This page reads version 1.`);
  const chats = [];
  const faults = [];
  list.forEach((item, index) => {
    const read = Array.isArray(item?.messages) ? readChat(item, (place, why) => faults.push(`Chat ${index + 1}, message ${place}: ${why}.`)) : null;
    if (read) chats.push(read);
    else if (!Array.isArray(item?.messages)) faults.push(`Chat ${index + 1}: it has no messages.`);
  });
  return { chats, faults };
}

/** Reads messages, whatever else is around them. Returns null if there are none. */
export function readChat(item, fault) {
  const made = newChat();
  const messages = [];
  item.messages.forEach((value, index) => {
    const why = contentFault(value);
    if (why) return fault(index + 1, why, value);
    const created = typeof value.created === "string" ? Date.parse(value.created) : value.created;
    messages.push(fullMessage({ ...value, id: newId(), chat: made.id, order: messages.length, created, owner: "" }));
  });
  if (!messages.length) return null;
  const first = messages.find((message) => message.role === "user") ?? messages[0];
  made.title = typeof item.title === "string" && item.title.trim() ? titleOf(item.title) : titleOf(first.content);
  const created = typeof item.created === "string" ? Date.parse(item.created) : item.created;
  made.created = time(created);
  for (const message of messages) if (message.state === "answering") message.state = "cut";
  return [made, messages];
}
