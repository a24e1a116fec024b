// Chats in the browser's database. Every message is a record of its own and every change is a transaction, so tabs do not overwrite each
// other. A record that is damaged is moved to a table of its own, where the user finds it.

import { chatFault, fullChat, fullMessage, messageFault, newChat } from "./records.js";

const NAME = "forebay-chats";
const TABLES = ["chats", "messages", "damaged"];
/** Records that are checked at a time. */
const CHECKED_AT_ONCE = 500;

/** Opens the database. If the browser has none for this page, chats live in memory, and `reason` says why. */
export async function openStore() {
  try {
    const disk = new Disk();
    await disk.connect();
    return new Store(disk, "");
  } catch (error) {
    return new Store(new Memory(), error.message || error.name);
  }
}

class Store {
  #watchers = [];
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;

  constructor(backend, reason) {
    this.backend = backend;
    this.reason = reason;
    if (this.#channel) this.#channel.onmessage = ({ data }) => this.#told(data);
  }

  /** Calls `watcher(news)` for changes that another tab makes, and for what it says by `say`. */
  watch(watcher) {
    this.#watchers.push(watcher);
  }

  /** Tells other tabs something. */
  say(news) {
    this.#channel?.postMessage(news);
  }

  #told(news) {
    if (typeof news !== "object" || news === null) return;
    for (const watcher of this.#watchers) watcher(news);
  }

  /** Returns all chats, the last changed first. */
  async chats() {
    const found = await this.#valid("chats", (tables) => tables.all("chats"), chatFault, fullChat);
    return found.sort((one, other) => other.updated - one.updated);
  }

  /** Returns a chat's messages in order. */
  async messages(chat) {
    const found = await this.#valid("messages", (tables) => tables.of(chat), messageFault, fullMessage);
    return found.sort((one, other) => one.order - other.order || one.created - other.created);
  }

  async message(id) {
    const found = await this.backend.run("readonly", (tables) => tables.get("messages", id));
    return found === undefined || messageFault(found) ? null : fullMessage(found);
  }

  async #valid(table, read, fault, full) {
    const values = await this.backend.run("readonly", read);
    const good = [];
    const bad = [];
    for (const { key, value } of values) (fault(value) ? bad : good).push({ key, value });
    if (bad.length) await this.#setAside(table, bad, fault);
    return good.map(({ value }) => full(value));
  }

  /** Moves records that are damaged. */
  async #setAside(table, records, fault) {
    await this.backend.run("readwrite", async (tables) => {
      for (const { key, value } of records) {
        await tables.put("damaged", { from: table, key, why: fault(value), value, found: Date.now() });
        await tables.remove(table, key);
      }
    });
    this.#told({ kind: "damaged" });
  }

  /** Keeps something that is no record, for the user to save. */
  async keepDamaged(from, why, value) {
    await this.backend.run("readwrite", (tables) => tables.put("damaged", { from, key: "", why, value, found: Date.now() }));
    this.#told({ kind: "damaged" });
  }

  async damaged() {
    return (await this.backend.run("readonly", (tables) => tables.all("damaged"))).map(({ value }) => value);
  }

  clearDamaged() {
    return this.backend.run("readwrite", (tables) => tables.clear("damaged"));
  }

  /** Checks every record, and gives messages without a chat one of their own. */
  async check() {
    const chats = new Set((await this.chats()).map((chat) => chat.id));
    const lost = new Map();
    let after;
    for (;;) {
      let last;
      const read = async (tables) => {
        const values = await tables.some("messages", after, CHECKED_AT_ONCE);
        last = values.at(-1)?.key;
        return values;
      };
      for (const message of await this.#valid("messages", read, messageFault, fullMessage)) {
        if (!chats.has(message.chat)) lost.set(message.chat, [...(lost.get(message.chat) ?? []), message]);
      }
      if (last === undefined) break;
      after = last;
    }
    for (const [id, messages] of lost) {
      const first = messages.sort((one, other) => one.order - other.order)[0];
      await this.putChat({ ...newChat(first.content), id, created: first.created });
    }
  }

  /** Adds messages to the end of a chat, and the chat if it is new. Returns the messages with their places. */
  async append(chat, messages) {
    await this.backend.run("readwrite", async (tables) => {
      const known = await tables.get("chats", chat.id);
      const before = await tables.of(chat.id);
      let order = before.reduce((most, { value }) => (value.order > most ? value.order : most), 0);
      for (const message of messages) {
        message.order = ++order;
        await tables.put("messages", { ...message });
      }
      await tables.put("chats", { ...chat, ...(chatFault(known) ? {} : known), updated: Date.now(), model: chat.model });
    });
    this.say({ kind: "chat", chat: chat.id });
    return messages;
  }

  /** Changes a message that is still there. Returns false if it is gone. */
  async change(message, fields) {
    const there = await this.backend.run("readwrite", async (tables) => {
      const known = await tables.get("messages", message.id);
      if (known === undefined) return false;
      await tables.put("messages", { ...known, ...fields });
      return true;
    });
    if (there) this.say({ kind: "message", chat: message.chat, id: message.id });
    return there;
  }

  /** Removes messages of a chat. */
  async remove(chat, ids) {
    await this.backend.run("readwrite", async (tables) => {
      for (const id of ids) await tables.remove("messages", id);
    });
    this.say({ kind: "chat", chat });
  }

  /** Adds or replaces a chat and messages as they are. */
  async putChat(chat, messages = []) {
    await this.backend.run("readwrite", async (tables) => {
      await tables.put("chats", { ...chat });
      for (const message of messages) await tables.put("messages", { ...message });
    });
    this.say({ kind: "chat", chat: chat.id });
  }

  /** Changes a chat's title or model, if the chat is still there. */
  async changeChat(id, fields) {
    await this.backend.run("readwrite", async (tables) => {
      const known = await tables.get("chats", id);
      if (known !== undefined) await tables.put("chats", { ...known, ...fields });
    });
    this.say({ kind: "chat", chat: id });
  }

  /** Removes a chat. Returns what `putChat` needs to bring it back. */
  async removeChat(id) {
    const removed = await this.backend.run("readwrite", async (tables) => {
      const chat = await tables.get("chats", id);
      const messages = await tables.of(id);
      await tables.remove("chats", id);
      for (const { key } of messages) await tables.remove("messages", key);
      return { chat, messages: messages.map(({ value }) => value) };
    });
    this.say({ kind: "chat", chat: id });
    return removed;
  }
}

/** The browser's database. */
class Disk {
  #base = null;

  /** Opens the database, with a new version if tables are missing. */
  async connect(version) {
    const base = await new Promise((resolve, reject) => {
      const opening = indexedDB.open(NAME, version);
      opening.onupgradeneeded = () => addTables(opening);
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(opening.error);
      opening.onblocked = () => reject(new Error("another tab holds an older form of the database; close it"));
    });
    const whole = TABLES.every((table) => base.objectStoreNames.contains(table));
    if (!whole || !base.transaction("messages").objectStore("messages").indexNames.contains("chat")) {
      const next = base.version + 1;
      base.close();
      return this.connect(next);
    }
    base.onversionchange = () => {
      base.close();
      this.#base = null;
    };
    base.onclose = () => (this.#base = null);
    this.#base = base;
  }

  /** Runs a transaction: all of `work` is kept, or nothing. */
  async run(mode, work) {
    if (!this.#base) await this.connect();
    let failure = null;
    return new Promise((resolve, reject) => {
      const transaction = this.#base.transaction(TABLES, mode);
      let result;
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = () => reject(failure ?? transaction.error ?? new Error("the browser's database refused the change"));
      Promise.resolve(work(new Tables(transaction))).then(
        (value) => (result = value),
        (error) => {
          failure = error;
          try {
            transaction.abort();
          } catch {
            reject(error);
          }
        },
      );
    });
  }
}

function addTables({ result: base, transaction }) {
  const table = (name, options) => (base.objectStoreNames.contains(name) ? transaction.objectStore(name) : base.createObjectStore(name, options));
  table("chats", { keyPath: "id" });
  table("damaged", { autoIncrement: true });
  const messages = table("messages", { keyPath: "id" });
  if (!messages.indexNames.contains("chat")) messages.createIndex("chat", "chat");
}

const done = (wanted) =>
  new Promise((resolve, reject) => {
    wanted.onsuccess = () => resolve(wanted.result);
    wanted.onerror = () => reject(wanted.error);
  });

/** The tables of the database within one transaction. */
class Tables {
  constructor(transaction) {
    this.transaction = transaction;
  }

  get(table, key) {
    return done(this.transaction.objectStore(table).get(key));
  }

  put(table, value) {
    return done(this.transaction.objectStore(table).put(value));
  }

  remove(table, key) {
    return done(this.transaction.objectStore(table).delete(key));
  }

  clear(table) {
    return done(this.transaction.objectStore(table).clear());
  }

  all(table) {
    return this.#read(this.transaction.objectStore(table));
  }

  of(chat) {
    return this.#read(this.transaction.objectStore("messages").index("chat"), IDBKeyRange.only(chat));
  }

  /** Returns at most `count` records after a key. */
  some(table, after, count) {
    return this.#read(this.transaction.objectStore(table), after === undefined ? null : IDBKeyRange.lowerBound(after, true), count);
  }

  async #read(source, range = null, count = undefined) {
    const values = await done(source.getAll(range, count));
    // An index gives keys of its own.
    const keys = source instanceof IDBObjectStore ? await done(source.getAllKeys(range, count)) : values.map((value) => value.id);
    return values.map((value, index) => ({ key: keys[index], value }));
  }
}

/** Stands in for the database where a browser has none. What it keeps is gone with the page. */
class Memory {
  #tables = Object.fromEntries(TABLES.map((name) => [name, new Map()]));
  #added = 0;

  async run(_, work) {
    return work(this);
  }

  get(table, key) {
    return this.#tables[table].get(key);
  }

  put(table, value) {
    this.#tables[table].set(value.id ?? ++this.#added, structuredClone(value));
  }

  remove(table, key) {
    this.#tables[table].delete(key);
  }

  clear(table) {
    this.#tables[table].clear();
  }

  all(table) {
    return [...this.#tables[table]].map(([key, value]) => ({ key, value: structuredClone(value) }));
  }

  of(chat) {
    return this.all("messages").filter(({ value }) => value.chat === chat);
  }

  some(table, after) {
    return after === undefined ? this.all(table) : [];
  }
}
