// What chats become in requests and files, and how code is coloured.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parts } from "../highlight.js";
import { chatFault, fullMessage, isLeftOut, messageFault, newChat, newMessage, parseFile, sent, titleOf, toJson, toMarkdown } from "../records.js";

const chat = newChat("Why is the sky blue?");
const say = (role, content, more) => newMessage(chat.id, role, content, more);
const roles = (messages) => messages.map(({ role, content }) => `${role} ${content}`);

test("a request has the system prompt and what was answered", () => {
  const messages = [say("user", "a"), say("assistant", "b"), say("user", "c")];
  assert.deepEqual(roles(sent(messages, " be brief")), ["system  be brief", "user a", "assistant b", "user c"]);
  assert.deepEqual(roles(sent(messages, "  ")), ["user a", "assistant b", "user c"]);
});

test("a refused question is left out, also with its failure, until it is the last one", () => {
  const refused = say("assistant", "", { state: "refused", error: "too long" });
  const messages = [say("user", "long"), refused, say("user", "short")];
  assert.deepEqual(roles(sent(messages)), ["user short"]);
  assert.deepEqual(roles(sent(messages.slice(0, 1))), ["user long"]);
  assert.deepEqual(messages.map((_, index) => isLeftOut(messages, index)), [true, false, false]);
});

test("a cut answer is sent, and goes on where it is the last message", () => {
  const messages = [say("user", "a"), say("assistant", "half", { state: "cut", error: "broke off" })];
  assert.deepEqual(roles(sent(messages)), ["user a", "assistant half"]);
});

test("a file of chats comes back as it was, with other ids", () => {
  const messages = [say("user", "a\n<b>"), say("assistant", "b", { reasoning: "hm", model: "m", note: "2 tokens", state: "stopped" })];
  const { chats, faults } = parseFile(toJson([[chat, messages]]));
  assert.deepEqual(faults, []);
  const [[read, list]] = chats;
  assert.equal(read.title, chat.title);
  assert.notEqual(read.id, chat.id);
  assert.equal(read.created, chat.created);
  const bare = (all) => all.map(({ role, content, reasoning, model, note, state, created }) => ({ role, content, reasoning, model, note, state, created }));
  assert.deepEqual(bare(list), bare(messages));
  assert.ok(list.every((message) => message.chat === read.id && !messageFault(message)));
});

test("other lists of messages are read, and what is wrong in them is said", () => {
  const { chats, faults } = parseFile(JSON.stringify([{ role: "user", content: "a" }, { role: "system", content: "b" }, null, { role: "assistant" }]));
  assert.deepEqual(roles(chats[0][1]), ["user a"]);
  assert.equal(faults.length, 3);
  assert.match(faults[0], /message 2: its role/);
  assert.equal(parseFile('{"messages": [{"role": "user", "content": "a"}]}').chats.length, 1);
  for (const text of ["", "{", "3", "null", "{}", '{"chats": 3}']) assert.throws(() => parseFile(text), /^Error: The file/, text);
  assert.deepEqual(parseFile('{"chats": [null, 3, {"messages": 1}]}').chats, []);
  assert.throws(() => parseFile('{"format": "forebay-chats", "version": 2, "chats": []}'), /version 2/);
});

test("damaged records are told from whole ones", () => {
  const whole = say("user", "a");
  assert.equal(messageFault(whole), "");
  for (const value of [null, 3, [], "a", {}]) assert.notEqual(messageFault(value), "");
  for (const [field, value] of [["id", ""], ["id", 3], ["chat", null], ["order", "1"], ["order", NaN], ["role", "system"], ["content", null], ["content", {}]]) {
    assert.notEqual(messageFault({ ...whole, [field]: value }), "", `${field} ${value}`);
  }
  assert.equal(chatFault(chat), "");
  assert.notEqual(chatFault({ id: "a" }), "");
  const odd = fullMessage({ ...whole, reasoning: 3, note: null, state: "what", created: "x" });
  assert.deepEqual([odd.reasoning, odd.note, odd.state], ["", "", "done"]);
  assert.ok(Number.isFinite(odd.created));
});

test("titles are short and of one line", () => {
  assert.equal(titleOf("  a\n b "), "a b");
  assert.equal(titleOf(" \n"), "New chat");
  const long = titleOf("😀".repeat(500));
  assert.ok([...long].length <= 80 && long.endsWith("…") && !long.includes("\ufffd"));
});

test("Markdown of a chat has everything in it", () => {
  const text = toMarkdown(chat, [say("user", "a"), say("assistant", "b", { reasoning: "hm", model: "m" }), say("assistant", "c", { state: "cut", error: "broke off" })]);
  for (const part of ["# Why is the sky blue?", "## You\n\na", "## m", "hm", "b", "*broke off*"]) assert.ok(text.includes(part), part);
});

test("code is coloured without losing a character", () => {
  const kinds = (code, language) => parts(code, language).filter(([kind]) => kind).map(([kind, text]) => `${kind} ${text}`);
  assert.deepEqual(kinds("fn a<'b>() { // c\n 0x1F; \"d\\\"\" }", "rust"), ["keyword fn", "comment // c", "number 0x1F", 'string "d\\""']);
  assert.deepEqual(kinds("def f(): # c\n  return '''x\ny'''", "Python"), ["keyword def", "comment # c", "keyword return", "string '''x\ny'''"]);
  assert.deepEqual(kinds("SELECT 1 -- c", "sql"), ["keyword SELECT", "number 1", "comment -- c"]);
  assert.deepEqual(kinds("+a\n-b\n c", "diff"), ["added +a", "removed -b"]);
  assert.equal(parts("x", "nothing known"), null);
  const code = "`'\"\\/*--#<a b='c'>\n0x 1e5 $x é /* ".repeat(100);
  for (const language of ["c", "rust", "py", "sql", "json", "html", "css", "diff"]) {
    assert.equal(parts(code, language).map(([, text]) => text).join(""), code, language);
  }
});
