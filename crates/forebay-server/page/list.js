// The list of chats beside the conversation, and files of chats.

import { element } from "./markdown.js";
import { parseFile, toJson, toMarkdown } from "./records.js";
import { announce, button, download, get, notice } from "./ui.js";

/** Larger files are not read. */
const FILE_MAX = 256 * 1024 * 1024;
const JSON_TYPE = "application/json";

/** Starts the list. `open(id)` shows a chat. Returns `show(current, answering)`, which reads the list again. */
export function startList({ store, open }) {
  let turn = 0;

  /** Shows all chats. `answering` has the ids of those that receive an answer. */
  async function show(current, answering) {
    const mine = ++turn;
    const chats = await store.chats();
    if (mine !== turn) return;
    const focused = document.activeElement?.dataset?.chat;
    const rows = chats.map((chat) => {
      const row = element("li");
      const link = button(chat.title, () => {
        closeSide();
        open(chat.id);
      });
      link.dataset.chat = chat.id;
      link.title = `${chat.title}\n${new Date(chat.updated).toLocaleString()}`;
      if (chat.id === current) link.setAttribute("aria-current", "true");
      if (answering.has(chat.id)) link.append(element("span", "mark", " …"));
      row.append(link);
      return row;
    });
    if (!rows.length) rows.push(element("li", "none", "No chats yet."));
    get("chats").replaceChildren(...rows);
    if (focused) get("chats").querySelector(`[data-chat="${CSS.escape(focused)}"]`)?.focus();
  }

  get("export-all").addEventListener("click", async () => {
    const chats = [];
    for (const chat of await store.chats()) chats.push([chat, await store.messages(chat.id)]);
    download("forebay-chats.json", JSON_TYPE, toJson(chats));
  });
  get("import").addEventListener("click", () => get("import-file").click());
  get("import-file").addEventListener("change", async () => {
    const [file] = get("import-file").files;
    get("import-file").value = "";
    if (file) await take(file);
  });

  async function take(file) {
    try {
      if (file.size > FILE_MAX) throw new Error("The file is larger than 256 MiB.");
      const { chats, faults } = parseFile(await file.text());
      for (const [chat, messages] of chats) await store.putChat(chat, messages);
      const more = faults.length > 3 ? ` And ${faults.length - 3} more.` : "";
      const words = `${chats.length} ${chats.length === 1 ? "chat" : "chats"} imported from ${file.name}.`;
      notice("import", [words, ...faults.slice(0, 3)].join(" ") + more);
      if (chats.length) open(chats[0][0].id);
    } catch (error) {
      notice("import", `${file.name} was not imported. ${error.message}`);
    }
  }

  get("side-toggle").addEventListener("click", () => {
    const is = get("chat").classList.toggle("side-open");
    get("side-toggle").setAttribute("aria-expanded", String(is));
    if (is) get("chats").querySelector("button")?.focus();
  });
  get("side").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && closeSide()) {
      event.stopPropagation();
      get("side-toggle").focus();
    }
  });
  get("shade").addEventListener("click", closeSide);

  return { show };
}

/** Hides the list where it covers the chat. Returns true if it was open. */
export function closeSide() {
  const was = get("chat").classList.contains("side-open");
  get("chat").classList.remove("side-open");
  get("side-toggle").setAttribute("aria-expanded", "false");
  return was;
}

/** Makes the menu of the chat that is shown. `current()` returns the chat and its messages. */
export function startMenu({ current, rename, remove }) {
  const menu = get("menu");
  const file = (kind) => `${current()[0].title.replace(/[^\p{L}\p{N} ._-]+/gu, "").trim().slice(0, 60) || "chat"}.${kind}`;
  const items = [
    ["Rename", () => startRename(current()[0].title, rename)],
    ["Save as Markdown", () => download(file("md"), "text/markdown", toMarkdown(...current()))],
    ["Save as JSON", () => download(file("json"), JSON_TYPE, toJson([current()]))],
    ["Delete chat", remove],
  ];
  for (const [label, work] of items) {
    menu.lastElementChild.append(button(label, () => {
      menu.open = false;
      work();
    }));
  }
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.firstElementChild.focus();
  });
  document.addEventListener("click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
}

function startRename(title, rename) {
  const field = get("rename");
  const end = (keep) => {
    if (field.hidden) return;
    field.hidden = true;
    get("title").hidden = false;
    if (keep && field.value.trim() && field.value !== title) {
      rename(field.value.trim());
      announce("The chat has a new name.");
    }
  };
  field.value = title;
  field.hidden = false;
  get("title").hidden = true;
  field.onblur = () => end(true);
  field.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
    get("prompt").focus();
  };
  field.focus();
  field.select();
}
