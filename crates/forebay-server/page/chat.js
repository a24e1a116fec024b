// The conversation that is shown, and the answers that come.

import { KeyNeeded } from "./api.js";
import { changing, receive } from "./answer.js";
import { session } from "./kept.js";
import { closeSide, startList, startMenu } from "./list.js";
import { element } from "./markdown.js";
import { messageView } from "./message.js";
import { moveOld } from "./moved.js";
import { isLeftOut, newChat, newId, newMessage, sent } from "./records.js";
import { sampling, showWrong, startSettings, system } from "./settings.js";
import { openStore } from "./store.js";
import { announce, download, endNotice, fit, get, isNotice, notice } from "./ui.js";

/** This page, as the owner of the answers that it receives. */
const PAGE = newId();
const UNFINISHED = "forebay-unfinished";
const DRAFT = "forebay-draft-";
const NEW = "new";
/** How long another tab may take to say that it still receives an answer, in milliseconds. */
const REPLY_WITHIN = 700;
const CUT = "The page was closed or reloaded before the answer was complete.";

export function startChat({ askForKey, moved }) {
  startSettings();
  const conversation = new Conversation(askForKey, moved);
  conversation.ready = conversation.start();
  listen(conversation);
  return conversation;
}

class Conversation {
  /** The chat that is shown. It is in the store once it has a message. */
  chat = newChat();
  messages = [];
  views = new Map();
  /** Answers that this page receives, by chat. */
  running = new Map();
  heard = new Set();
  /** The model that the chat used last, as far as it is known. */
  wantedModel = "";

  constructor(askForKey, moved) {
    this.askForKey = askForKey;
    this.moved = moved;
  }

  async start() {
    this.store = await openStore();
    this.list = startList({ store: this.store, open: (id) => this.open(id) });
    startMenu({ current: () => [this.chat, this.messages], rename: (title) => this.rename(title), remove: () => this.removeChat() });
    if (this.store.reason) notice("memory", `This browser keeps no chats for this page (${this.store.reason}). They are gone when the page is closed; save them by the menu.`);
    this.store.watch((news) => this.told(news));
    await this.tried(() => moveOld(this.store));
    await this.tried(() => this.finishReload());
    const wanted = location.hash.slice(1);
    await this.open(!wanted || wanted === "machine" ? ((await this.tried(() => this.store.chats()))?.[0]?.id ?? NEW) : wanted);
    await this.tried(() => this.store.check());
    await this.tried(() => this.tellDamaged());
    await this.showList();
  }

  /** Does something with the store. If that fails, the chat continues in this page, and its user is told. */
  async tried(work) {
    try {
      return await work();
    } catch (error) {
      const full = error.name === "QuotaExceededError" ? "it has no room" : error.message || error.name;
      if (isNotice("unkept")) return undefined;
      notice("unkept", `This browser could not keep the last change: ${full}. What you see may be gone when the page is closed; save it by the menu.`);
      return undefined;
    }
  }

  /** Puts back what came of an answer after it was last kept, before the page was reloaded. */
  async finishReload() {
    const kept = session.get(UNFINISHED);
    session.remove(UNFINISHED);
    let list = [];
    try {
      list = JSON.parse(kept) ?? [];
    } catch {
      // It was not written whole. The store has all but the last part of a second.
    }
    if (!Array.isArray(list)) return;
    for (const { id, content, reasoning } of list) {
      if (typeof content !== "string" || typeof reasoning !== "string") continue;
      const message = await this.store.message(String(id));
      if (message?.state !== "answering" || content.length < message.content.length) continue;
      await this.store.change(message, { content, reasoning, state: "cut", error: CUT });
    }
  }

  leave() {
    const list = [...this.running.values()].map(({ message: { id, content, reasoning } }) => ({ id, content, reasoning }));
    if (list.length) session.set(UNFINISHED, JSON.stringify(list));
  }

  /** Shows a chat, or an empty one. */
  async open(id) {
    this.keepDraft();
    const chats = id === NEW ? [] : ((await this.tried(() => this.store.chats())) ?? []);
    const known = chats.find((chat) => chat.id === id);
    const messages = known ? ((await this.tried(() => this.store.messages(id))) ?? []) : [];
    this.chat = known ?? newChat();
    this.isNew = !known;
    this.messages = messages;
    this.views.clear();
    get("messages").replaceChildren();
    this.moved();
    get("prompt").value = session.get(DRAFT + this.hash()) ?? "";
    fit(get("prompt"));
    this.chooseModel(this.chat.model);
    this.show(true);
    await this.showList();
    this.ask();
  }

  hash() {
    return this.isNew ? NEW : this.chat.id;
  }

  keepDraft() {
    const text = get("prompt").value;
    if (text) session.set(DRAFT + this.hash(), text);
    else session.remove(DRAFT + this.hash());
  }

  showList() {
    return this.tried(() => this.list?.show(this.chat.id, new Set(this.running.keys())));
  }

  /** Shows the messages as they are now. Nodes of messages that stay are kept. */
  show(toEnd = false) {
    get("title").textContent = this.chat.title;
    document.title = this.isNew ? "forebay" : `${this.chat.title} – forebay`;
    get("menu").hidden = this.isNew;
    const mine = this.running.get(this.chat.id);
    get("send").hidden = Boolean(mine);
    get("stop").hidden = !mine;
    // An answer that comes has what the store does not have yet.
    this.messages = this.messages.map((message) => (message.id === mine?.message.id ? mine.message : message));
    const ids = new Set(this.messages.map((message) => message.id));
    for (const [id, { node }] of this.views) {
      if (ids.has(id)) continue;
      node.remove();
      this.views.delete(id);
    }
    get("messages").querySelector(".empty")?.remove();
    this.holding(() => this.messages.forEach((_, index) => this.place(index)), toEnd);
    if (!this.messages.length) get("messages").append(element("p", "empty", "No messages yet. Write one below."));
  }

  /** Shows one message at its place. */
  place(index) {
    const message = this.messages[index];
    if (!this.views.has(message.id)) this.views.set(message.id, messageView(message, this));
    const view = this.views.get(message.id);
    const there = get("messages").children[index];
    if (there !== view.node) get("messages").insertBefore(view.node, there ?? null);
    view.update(message, {
      last: index === this.messages.length - 1,
      busy: this.busy(),
      elsewhere: message.state === "answering" && !this.receives(message),
      leftOut: isLeftOut(this.messages, index),
    });
  }

  /** Returns true if this tab or another one receives an answer of the chat. */
  busy() {
    return this.messages.some((message) => message.state === "answering");
  }

  /** Does something that may change the height of the chat. Who reads its end still sees the end then. */
  holding(work, toEnd = false) {
    const box = get("messages");
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    work();
    if (toEnd || near) box.scrollTop = box.scrollHeight;
  }

  chooseModel(name) {
    if (name) this.wantedModel = name;
    if ([...get("model").options].some((option) => option.value === this.wantedModel)) get("model").value = this.wantedModel;
  }

  setModels(names) {
    const before = get("model").value || this.wantedModel;
    const options = names.map((name) => {
      const option = element("option", "", name);
      option.value = name;
      return option;
    });
    get("model").replaceChildren(...options);
    if (names.includes(before)) get("model").value = before;
    else if (!before) this.chooseModel(this.chat.model);
  }

  // What the user does

  async send(text) {
    await this.ready;
    if (!text.trim()) return;
    if (this.busy()) return announce("Another tab receives an answer in this chat.");
    const model = get("model").value;
    if (this.isNew) {
      session.remove(DRAFT + NEW);
      Object.assign(this.chat, newChat(text), { id: this.chat.id });
      this.isNew = false;
      this.moved();
    }
    this.chat.model = model;
    get("prompt").value = "";
    fit(get("prompt"));
    this.keepDraft();
    endNotice("replaced");
    await this.answer(this.chat, this.messages, text);
  }

  /** Adds a question, unless the last message is one, and its answer after the messages `before` it, and receives the answer. */
  async answer(chat, before, text = null) {
    const model = get("model").value;
    const message = newMessage(chat.id, "assistant", "", { model, state: "answering", owner: PAGE });
    const asked = text === null ? before : [...before, newMessage(chat.id, "user", text)];
    const added = [...asked.slice(before.length), message];
    // The user may have gone to another chat meanwhile.
    if (this.chat.id === chat.id) this.messages = [...asked, message];
    const run = this.begin(message);
    await this.tried(() => this.store.append(chat, added));
    await this.receive(run, asked);
  }

  begin(message) {
    const run = { message, abort: new AbortController() };
    this.running.set(message.chat, run);
    this.show(true);
    return run;
  }

  async receive(run, before) {
    const { message, abort } = run;
    const wanted = { model: message.model, messages: sent(before, system()), stream: true, stream_options: { include_usage: true }, ...sampling() };
    this.showList();
    const keep = async () => (await this.tried(() => this.store.change(message, changing(message)))) !== false;
    const failure = await receive(message, wanted, { abort, keep, grown: this.grown(message) });
    message.owner = "";
    this.running.delete(message.chat);
    if (this.chat.id === message.chat) this.show();
    await keep();
    if (failure instanceof KeyNeeded) this.askForKey();
    announce(message.error || (message.state === "stopped" ? "Answer stopped." : "Answer complete."));
    this.showList();
  }

  /** Returns what shows an answer as it grows. It draws at most once in a frame, and rests after a long drawing. */
  grown(message) {
    let waiting = false;
    const draw = () => {
      const began = performance.now();
      const index = this.messages.indexOf(message);
      if (index >= 0 && message.state === "answering") {
        this.holding(() => this.place(index));
      }
      setTimeout(() => (waiting = false), 3 * (performance.now() - began));
    };
    return () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(draw);
    };
  }

  stop() {
    this.running.get(this.chat.id)?.abort.abort();
  }

  async retry(message) {
    if (this.busy()) return;
    await this.replace(this.messages.indexOf(message));
  }

  /** Answers again from a message on, which is the last one or the last question. What was there can be brought back. */
  async replace(index, text = null) {
    const { chat } = this;
    const before = this.messages.slice(0, index);
    const old = this.messages.slice(index);
    this.messages = before;
    await this.tried(() => this.store.remove(chat.id, old.map(({ id }) => id)));
    await this.answer(chat, before, text);
    if (this.chat.id === chat.id && old.at(-1).content) notice("replaced", "The old answer is replaced.", [["Bring it back", () => this.bringBack(chat, old)]]);
  }

  async bringBack(chat, old) {
    const now = (await this.tried(() => this.store.messages(chat.id))) ?? [];
    const newer = now.filter(({ order }) => order >= old[0].order).map(({ id }) => id);
    await this.tried(() => this.store.remove(chat.id, newer));
    await this.tried(() => this.store.putChat(chat, old));
    await this.open(chat.id);
  }

  /** Lets the model continue an answer that was cut. */
  async goOn(message) {
    if (this.busy()) return;
    const before = this.messages.slice(0, this.messages.indexOf(message)).concat({ ...message });
    Object.assign(message, { state: "answering", owner: PAGE, error: "", note: "", model: get("model").value });
    const run = this.begin(message);
    await this.tried(() => this.store.change(message, changing(message)));
    await this.receive(run, before);
  }

  /** Changes a message's text. `again` answers it again; what came after an earlier question stays in the old chat. */
  async edit(message, text, again) {
    if (this.busy()) return;
    const index = this.messages.indexOf(message);
    if (!again) {
      message.content = text;
      this.show();
      await this.tried(() => this.store.change(message, { content: text }));
      return;
    }
    if (index < this.messages.length - 2) return this.branch(index, text);
    if (!index) this.rename(newChat(text).title, message.content);
    await this.replace(index, text);
  }

  /** Goes on with an earlier question in a new chat. */
  async branch(index, text) {
    const chat = { ...newChat(), title: this.chat.title, model: this.chat.model };
    const messages = this.messages.slice(0, index).map((message) => ({ ...message, id: newId(), chat: chat.id }));
    const from = this.chat.id;
    await this.tried(() => this.store.putChat(chat, messages));
    await this.open(chat.id);
    notice("branch", "The chat continues here. The old one stays as it was.", [["Show the old one", () => this.open(from)]]);
    await this.answer(chat, messages, text);
  }

  /** Deletes a message, and the failure that answered it. */
  async remove(message) {
    if (this.busy()) return;
    const index = this.messages.indexOf(message);
    const gone = this.messages.slice(index, index + (isLeftOut(this.messages, index) ? 2 : 1));
    const { chat } = this;
    this.messages = this.messages.filter((one) => !gone.includes(one));
    this.show();
    await this.tried(() => this.store.remove(chat.id, gone.map(({ id }) => id)));
    notice("deleted", "The message is deleted.", [["Undo", async () => {
      await this.tried(() => this.store.putChat(chat, gone));
      await this.open(chat.id);
    }]]);
  }

  /** Renames the chat; if `only` is given, only if its name still comes from that text. */
  async rename(title, only = null) {
    if (only !== null && this.chat.title !== newChat(only).title) return;
    this.chat.title = title;
    this.show();
    await this.tried(() => this.store.changeChat(this.chat.id, { title }));
    await this.showList();
  }

  async removeChat() {
    this.stop();
    const { id, title } = this.chat;
    const removed = await this.tried(() => this.store.removeChat(id));
    await this.open(NEW);
    if (!removed?.chat) return;
    notice("deleted", `“${title}” is deleted.`, [["Undo", async () => {
      await this.tried(() => this.store.putChat(removed.chat, removed.messages));
      await this.open(id);
    }]]);
  }

  // What other tabs do

  told(news) {
    const here = news.chat === this.chat.id;
    if (news.kind === "who" && this.receives(news)) this.store.say({ kind: "here", id: news.id });
    if (news.kind === "here") this.heard.add(news.id);
    if (news.kind === "damaged") this.tried(() => this.tellDamaged());
    if (news.kind === "message" && here) this.tried(() => this.refreshMessage(news.id));
    if (news.kind === "chat") this.tried(() => this.refresh(here));
  }

  async refreshMessage(id) {
    const message = await this.store.message(id);
    const index = this.messages.findIndex((known) => known.id === id);
    if (!message || message.chat !== this.chat.id || this.receives(message)) return;
    if (index < 0) return this.refresh(true);
    this.messages[index] = message;
    this.show();
  }

  async refresh(here) {
    await this.showList();
    if (!here || this.isNew) return;
    const { id } = this.chat;
    const [chats, messages] = [await this.store.chats(), await this.store.messages(id)];
    if (this.chat.id !== id) return;
    const chat = chats.find((one) => one.id === id);
    if (!chat) {
      this.stop();
      await this.open(NEW);
      notice("gone", "The chat was deleted in another tab.");
      return;
    }
    this.chat = chat;
    // What this tab just added may not be in the store yet.
    const mine = this.running.get(id)?.message;
    const late = mine && !messages.some((message) => message.id === mine.id) ? this.messages.slice(-2) : [];
    this.messages = [...messages, ...late.filter((message) => !messages.some((one) => one.id === message.id))];
    this.show();
  }

  /** Returns true if this page receives the answer. */
  receives({ chat, id }) {
    return this.running.get(chat)?.message.id === id;
  }

  /** Asks other tabs whether they receive the answers of this chat that are not whole. What none receives was cut. */
  ask() {
    const { id } = this.chat;
    const open = this.messages.filter((message) => message.state === "answering" && !this.receives(message));
    for (const message of open) {
      this.heard.delete(message.id);
      this.store.say({ kind: "who", chat: id, id: message.id });
    }
    if (!open.length) return;
    setTimeout(async () => {
      for (const message of open) {
        if (this.heard.has(message.id)) continue;
        await this.tried(() => this.store.change(message, { state: "cut", error: CUT, owner: "" }));
      }
      if (this.chat.id === id) await this.tried(() => this.refresh(true));
    }, REPLY_WITHIN);
  }

  /** Says how many records were damaged, and gives them to the user. */
  async tellDamaged() {
    const found = await this.store.damaged();
    if (!found.length) return endNotice("damaged");
    const words = found.length === 1 ? "A stored record is damaged and was set aside." : `${found.length} stored records are damaged and were set aside.`;
    notice("damaged", `${words} The other chats are not affected.`, [
      ["Save as a file", () => {
        download("forebay-damaged.json", "application/json", JSON.stringify(found, null, 1));
        this.tellDamaged();
      }],
      ["Delete them", () => this.tried(() => this.store.clearDamaged())],
    ]);
  }
}

function listen(conversation) {
  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!showWrong()) conversation.send(get("prompt").value);
  });
  get("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    get("ask").requestSubmit();
  });
  get("prompt").addEventListener("input", () => {
    fit(get("prompt"));
    conversation.keepDraft();
  });
  get("stop").addEventListener("click", () => conversation.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") conversation.stop();
  });
  get("new-chat").addEventListener("click", async () => {
    closeSide();
    await conversation.ready;
    await conversation.open(NEW);
    get("prompt").focus();
  });
  addEventListener("pagehide", () => {
    conversation.keepDraft();
    conversation.leave();
  });
  addEventListener("resize", () => fit(get("prompt")));
}
