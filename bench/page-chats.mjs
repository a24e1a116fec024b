// Checks of the page's chats, used by `page-check.mjs`: reloads, tabs, servers that die, damaged storage, files, long and odd answers.

import { readFileSync } from "node:fs";
import http from "node:http";
import { join } from "node:path";

const event = (value) => `data: ${typeof value === "string" ? value : JSON.stringify(value)}\n\n`;
const delta = (content) => event({ choices: [{ index: 0, delta: { content } }] });

/** A server that passes the page on and answers chats by a script, so that answers can be slow, cut, or never end. */
class Relay {
  #sockets = new Set();
  requests = [];
  /** Answers a request: gets its body and the response. */
  script = (_, response) => response.end(delta("An answer.") + event("[DONE]"));

  constructor(address) {
    this.address = new URL(address);
    this.server = http.createServer((request, response) => this.#serve(request, response));
    this.server.on("connection", (socket) => {
      this.#sockets.add(socket);
      socket.on("close", () => this.#sockets.delete(socket));
    });
  }

  async start(port = 0) {
    await new Promise((next) => this.server.listen(port, "127.0.0.1", next));
    this.port = this.server.address().port;
    return `http://127.0.0.1:${this.port}`;
  }

  /** Ends at once, as a killed server does. */
  async kill() {
    const closed = new Promise((next) => this.server.close(next));
    for (const socket of this.#sockets) socket.destroy();
    await closed;
  }

  async #serve(request, response) {
    response.on("error", () => {});
    if (request.method === "POST") {
      let text = "";
      for await (const part of request) text += part;
      const body = JSON.parse(text);
      this.requests.push(body);
      response.writeHead(200, { "Content-Type": "text/event-stream" });
      return this.script(body, response);
    }
    if (request.url === "/live") {
      const model = { name: "model", rates: { generated_tokens: 0 } };
      return response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ models: [model] }));
    }
    const headers = { ...request.headers, host: this.address.host };
    delete headers.origin;
    const asked = http.request(new URL(request.url, this.address), { headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
    });
    asked.on("error", () => response.destroy());
    asked.end();
  }
}

const wait = (milliseconds) => new Promise((next) => setTimeout(next, milliseconds));
const bodies = (page, kind = "") => page.locator(`#messages .message${kind} .body`).allInnerTexts();
const same = (found, wanted) => JSON.stringify(found) === JSON.stringify(wanted) || Promise.reject(new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`.slice(0, 290)));
const chats = (page) => page.locator("#chats button").allInnerTexts();
const idle = (page) => page.locator("#send").waitFor({ state: "visible" });

/** Waits until the page has taken what Enter sends, which empties the box, or has said why not. */
export const taken = (page) =>
  page.waitForFunction(() => !document.getElementById("prompt").value || document.getElementById("announce").textContent.startsWith("Another tab"));

async function ask(page, text) {
  await page.evaluate(() => (document.getElementById("announce").textContent = ""));
  await page.locator("#prompt").fill(text);
  await page.locator("#prompt").press("Enter");
  await taken(page);
}

async function menu(page, name) {
  await page.locator("#menu summary").click();
  await page.getByRole("button", { name, exact: true }).click();
}

/** Clicks a button of a message. */
async function act(page, index, name) {
  const message = page.locator("#messages .message").nth(index);
  await message.hover();
  await message.getByRole("button", { name, exact: true }).click();
}

export async function checkChats({ browser, address, check, pictures, complaints }) {
  const relay = new Relay(address);
  const url = await relay.start();
  const tools = { browser, check, pictures, complaints, relay, url };
  tools.fresh = async (options = {}) => {
    const context = await browser.newContext({ viewport: { width: 1200, height: 800 }, acceptDownloads: true, ...options });
    const page = await context.newPage();
    page.on("pageerror", (error) => complaints.push(error.message));
    // The browser itself writes a line for a server that is gone.
    page.on("console", (message) => message.type() === "error" && !message.text().includes("net::") && complaints.push(message.text()));
    await page.goto(url);
    await page.waitForFunction(() => document.getElementById("model").options.length > 0 && document.querySelector("#chats li"));
    return page;
  };
  await reloads(tools);
  await tabs(tools);
  await faults(tools);
  await editing(tools);
  await lists(tools);
  await files(tools);
  await damage(tools);
  await looks(tools);
  await relay.kill();
}

/** Sends one part, and waits with the rest until `more` is called. */
function slowly(relay, first, rest = " and the rest.") {
  let more;
  const gate = new Promise((next) => (more = next));
  relay.script = async (_, response) => {
    response.write(delta(first));
    await gate;
    response.end(delta(rest) + event({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }) + event("[DONE]"));
  };
  return more;
}

async function reloads({ check, fresh, relay }) {
  const page = await fresh();
  await check("a reload while answering keeps the question and the answer so far", async () => {
    const more = slowly(relay, "Half an answer");
    await ask(page, "First question");
    await page.locator("#messages .body", { hasText: "Half an answer" }).waitFor();
    await page.reload();
    await page.locator(".failure", { hasText: "before the answer was complete" }).waitFor();
    more();
    return same(await bodies(page), ["First question", "Half an answer"]);
  });
  await check("Continue goes on with the cut answer", async () => {
    relay.script = (_, response) => response.end(delta(", whole now") + event("[DONE]"));
    await page.getByRole("button", { name: "Continue" }).click();
    await page.locator("#messages .body", { hasText: "whole now" }).waitFor();
    await idle(page);
    const { messages } = relay.requests.at(-1);
    if ((await page.locator(".failure").count()) > 0 || messages.at(-1).role !== "assistant") return false;
    return same(await bodies(page), ["First question", "Half an answer, whole now"]);
  });
  await check("a draft survives a reload", async () => {
    await page.locator("#prompt").fill("not sent yet");
    await page.reload();
    await page.waitForFunction(() => document.getElementById("prompt").value === "not sent yet");
    await page.locator("#prompt").fill("");
  });
  await check("the input box grows with a long line, and shrinks again", async () => {
    const height = () => page.locator("#prompt").evaluate((node) => node.offsetHeight);
    const before = await height();
    await page.locator("#prompt").fill("a long line that goes on ".repeat(30));
    const grown = await height();
    await page.locator("#prompt").fill("");
    return grown > 2 * before && (await height()) === before;
  });
  await page.context().close();
}

async function tabs({ check, fresh, relay, url }) {
  const one = await fresh();
  const open = async () => {
    const page = await one.context().newPage();
    await page.goto(url);
    await page.locator("#chats button").first().waitFor();
    return page;
  };
  relay.script = (body, response) => response.end(delta(`Answer to ${body.messages.at(-1).content}`) + event("[DONE]"));
  await ask(one, "one");
  await idle(one);
  const two = await open();
  await check("a second tab shows the chat, and what the first one adds", async () => {
    await same(await bodies(two), ["one", "Answer to one"]);
    await ask(one, "two");
    await two.locator("#messages .body", { hasText: "Answer to two" }).waitFor();
  });
  await check("tabs do not overwrite each other", async () => {
    await ask(two, "three");
    await idle(two);
    await one.locator("#messages .body", { hasText: "Answer to three" }).waitFor();
    await ask(one, "four");
    await idle(one);
    const wanted = ["one", "two", "three", "four"].flatMap((text) => [text, `Answer to ${text}`]);
    for (const page of [one, two]) {
      await page.reload();
      await page.locator("#messages .body", { hasText: "Answer to four" }).waitFor();
      await same(await bodies(page), wanted);
    }
  });
  await check("two tabs that send at the same moment keep both questions", async () => {
    await Promise.all([ask(one, "left"), ask(two, "right")]);
    await Promise.all([idle(one), idle(two)]);
    // One of them may have been told that the other receives an answer; then its text is still in the box.
    const boxes = [await one.locator("#prompt").inputValue(), await two.locator("#prompt").inputValue()];
    for (const page of [one, two]) await page.locator("#prompt").fill("");
    for (const text of ["left", "right"].filter((text) => !boxes.includes(text))) {
      for (const page of [one, two]) await page.locator("#messages .body", { hasText: `Answer to ${text}` }).waitFor();
      await same((await bodies(one)).filter((body) => body === text), [text]);
    }
  });
  await check("a tab shows the answer that another one receives, and leaves it alone", async () => {
    const more = slowly(relay, "Slowly");
    await ask(one, "slow?");
    await two.locator("#messages .body", { hasText: "Slowly" }).waitFor();
    await two.reload();
    await two.locator(".left-out", { hasText: "Another tab receives" }).waitFor();
    await wait(1200);
    if ((await two.locator(".failure").count()) > 0) return false;
    more();
    await two.locator("#messages .body", { hasText: "Slowly and the rest." }).waitFor();
  });
  await check("a closed tab's answer is marked as cut in the other one", async () => {
    const more = slowly(relay, "Never whole");
    const three = await open();
    await ask(three, "gone?");
    await two.locator("#messages .body", { hasText: "Never whole" }).waitFor();
    await three.close();
    await two.reload();
    await two.locator(".failure", { hasText: "before the answer was complete" }).waitFor();
    more();
  });
  await check("a chat that is deleted in one tab leaves the other", async () => {
    await menu(one, "Delete chat");
    await two.locator(".notice", { hasText: "deleted in another tab" }).waitFor();
    await one.getByRole("button", { name: "Undo" }).click();
    await one.locator("#messages .body", { hasText: "Answer to four" }).waitFor();
  });
  await one.context().close();
}

async function faults({ check, fresh, relay, address, url }) {
  const page = await fresh();
  await check("a server that is killed in the middle leaves the part, as an error", async () => {
    slowly(relay, "Until here");
    await ask(page, "Tell me");
    await page.locator("#messages .body", { hasText: "Until here" }).waitFor();
    await relay.kill();
    await page.locator(".failure", { hasText: "broke off" }).waitFor();
    await same(await bodies(page), ["Tell me", "Until here"]);
    return page.getByRole("button", { name: "Continue" }).isVisible();
  });
  await check("a server that is gone is told in words, and the question stays", async () => {
    await ask(page, "Anybody?");
    await page.locator(".failure", { hasText: "does not answer" }).waitFor();
    return same((await bodies(page, ".user")).at(-1), "Anybody?");
  });
  relay.server.removeAllListeners("listening");
  await relay.start(Number(new URL(url).port));
  await check("Retry works when the server is back", async () => {
    relay.script = (_, response) => response.end(delta("Back.") + event("[DONE]"));
    await page.getByRole("button", { name: "Retry" }).click();
    await page.locator("#messages .body", { hasText: "Back." }).waitFor();
    return (await page.locator("#messages .message").count()) === 4;
  });
  for (const [name, text] of [["without its end", delta("half")], ["of no JSON", `${delta("half")}data: {"cho\n\n`], ["with an error", delta("half") + event({ error: { message: "the disk failed" } })]]) {
    await check(`a stream ${name} is an error, never a finished answer`, async () => {
      relay.script = (_, response) => response.end(text);
      await ask(page, name);
      await idle(page);
      return (await page.locator("#messages .message").last().locator(".failure").count()) === 1;
    });
  }
  await page.context().close();
}

async function editing({ check, fresh, relay }) {
  const page = await fresh();
  relay.script = (body, response) => {
    const { content } = body.messages.at(-1);
    if (content.length < 1000) return response.end(delta(`Re: ${content}`) + event("[DONE]"));
    response.end(event({ error: { message: "the context is full" } }));
  };
  const long = "too long ".repeat(1000).trim();
  await check("a message that is too long stays, and does not stop the chat", async () => {
    await ask(page, "short");
    await idle(page);
    await ask(page, long);
    await page.locator(".failure", { hasText: "the context is full" }).waitFor();
    await ask(page, "next");
    await idle(page);
    await same(relay.requests.at(-1).messages.map(({ content }) => content), ["short", "Re: short", "next"]);
    return same(await bodies(page, ".user"), ["short", long, "next"]);
  });
  await check("it can be edited where it is", async () => {
    await act(page, 2, "Edit");
    await page.getByLabel("Text of the message").fill("shorter");
    await page.getByRole("button", { name: "Save only" }).click();
    await stored(page, "shorter");
    await page.reload();
    await page.locator("#messages .body", { hasText: "Re: next" }).waitFor();
    return same(await bodies(page, ".user"), ["short", "shorter", "next"]);
  });
  await check("it can be deleted with its failure, and that can be undone", async () => {
    await act(page, 2, "Delete");
    await same(await bodies(page, ".user"), ["short", "next"]);
    await page.getByRole("button", { name: "Undo" }).click();
    await page.locator("#messages .body", { hasText: "shorter" }).waitFor();
    await same(await bodies(page, ".user"), ["short", "shorter", "next"]);
    await act(page, 2, "Delete");
  });
  await check("the last question is edited and answered again", async () => {
    await act(page, 2, "Edit");
    await page.getByLabel("Text of the message").fill("other");
    await page.getByRole("button", { name: "Send again" }).click();
    await page.locator("#messages .body", { hasText: "Re: other" }).waitFor();
    return same(await bodies(page), ["short", "Re: short", "other", "Re: other"]);
  });
  await check("Retry replaces an answer, and the old one can be brought back", async () => {
    relay.script = (_, response) => response.end(delta("Another answer") + event("[DONE]"));
    await page.getByRole("button", { name: "Retry" }).click();
    await page.locator("#messages .body", { hasText: "Another answer" }).waitFor();
    await page.getByRole("button", { name: "Bring it back" }).click();
    await page.locator("#messages .body", { hasText: "Re: other" }).waitFor();
    relay.script = (body, response) => response.end(delta(`Re: ${body.messages.at(-1).content}`) + event("[DONE]"));
    return same(await bodies(page), ["short", "Re: short", "other", "Re: other"]);
  });
  await check("a question that is asked again while another chat is shown reaches its own chat", async () => {
    const more = slowly(relay, "Late");
    await act(page, 2, "Edit");
    await page.getByLabel("Text of the message").fill("other");
    await page.evaluate(() => {
      document.querySelector(".edit").requestSubmit();
      document.getElementById("new-chat").click();
    });
    await page.locator(".empty").waitFor();
    await page.waitForFunction(() => document.querySelector("#chats .mark"));
    more();
    await page.waitForFunction(() => !document.querySelector("#chats .mark"));
    await page.locator("#chats button").first().click();
    await page.locator("#messages .body", { hasText: "Late and the rest." }).waitFor();
    await same(relay.requests.at(-1).messages.map(({ content }) => content), ["short", "Re: short", "other"]);
    relay.script = (body, response) => response.end(delta(`Re: ${body.messages.at(-1).content}`) + event("[DONE]"));
    return same(await bodies(page), ["short", "Re: short", "other", "Late and the rest."]);
  });
  await check("an earlier question goes on in a new chat, and nothing is lost", async () => {
    await act(page, 0, "Edit");
    await page.getByLabel("Text of the message").fill("first");
    await page.getByRole("button", { name: "Send again" }).click();
    await page.locator("#messages .body", { hasText: "Re: first" }).waitFor();
    await page.getByRole("button", { name: "Show the old one" }).click();
    await page.locator("#messages .body", { hasText: "Late and" }).last().waitFor();
    return (await chats(page)).length === 2;
  });
  await check("Esc ends an edit and keeps the text", async () => {
    await act(page, 0, "Edit");
    await page.keyboard.press("Escape");
    return (await page.locator(".edit").count()) === 0 && same((await bodies(page))[0], "short");
  });
  await page.context().close();
}

async function lists({ check, fresh, relay }) {
  const page = await fresh();
  relay.script = (body, response) => response.end(delta(`Re: ${body.messages.at(-1).content}`) + event("[DONE]"));
  await check("chats are listed by their first words, the last one first", async () => {
    for (const text of ["Alpha", "<img src=x onerror=window.evil=1>"]) {
      await page.locator("#new-chat").click();
      await ask(page, text);
      await idle(page);
    }
    await page.waitForFunction(() => !document.querySelector("#chats .mark"));
    await same(await chats(page), ["<img src=x onerror=window.evil=1>", "Alpha"]);
    return (await page.locator("#side img, #title img").count()) === 0;
  });
  await check("a chat is renamed", async () => {
    await menu(page, "Rename");
    await page.locator("#rename").fill("Beta");
    await page.locator("#rename").press("Enter");
    await page.locator("#chats button", { hasText: "Beta" }).waitFor();
    await page.reload();
    await page.locator("#title", { hasText: "Beta" }).waitFor();
  });
  await check("the browser's Back shows the chat before", async () => {
    await page.locator("#chats button", { hasText: "Alpha" }).click();
    await page.locator("#messages .body", { hasText: "Re: Alpha" }).waitFor();
    await page.goBack();
    await page.locator("#title", { hasText: "Beta" }).waitFor();
  });
  await check("a deleted chat comes back by Undo", async () => {
    await menu(page, "Delete chat");
    await page.locator(".empty").waitFor();
    await same(await chats(page), ["Alpha"]);
    await page.getByRole("button", { name: "Undo" }).click();
    await page.locator("#title", { hasText: "Beta" }).waitFor();
    return same([...(await chats(page))].sort(), ["Alpha", "Beta"]);
  });
  await check("a chat that is deleted while it is answered comes back with what had come", async () => {
    slowly(relay, "Only this");
    await ask(page, "deleted?");
    await page.locator("#messages .body", { hasText: "Only this" }).waitFor();
    await wait(600);
    await menu(page, "Delete chat");
    await page.getByRole("button", { name: "Undo" }).click();
    await page.locator("#messages .body", { hasText: "Only this" }).waitFor();
    await page.getByRole("button", { name: "Continue" }).waitFor();
    await act(page, 3, "Delete");
    await act(page, 2, "Delete");
  });
  await check("an answer goes on while another chat is shown", async () => {
    const more = slowly(relay, "Begun");
    await ask(page, "behind");
    await page.locator("#messages .body", { hasText: "Begun" }).waitFor();
    await page.locator("#chats button", { hasText: "Alpha" }).click();
    await page.locator("#title", { hasText: "Alpha" }).waitFor();
    more();
    await page.waitForFunction(() => !document.querySelector("#chats .mark"));
    await page.locator("#chats button", { hasText: "Beta" }).click();
    await page.locator("#messages .body", { hasText: "Begun and the rest." }).waitFor();
  });
  await page.context().close();
}

async function files({ check, fresh, relay, pictures }) {
  const page = await fresh();
  relay.script = (_, response) => response.end(delta("**bold**") + event("[DONE]"));
  await ask(page, "Save this");
  await idle(page);
  const saved = async (work, name) => {
    const coming = page.waitForEvent("download");
    await work();
    const file = join(pictures, name);
    await (await coming).saveAs(file);
    return file;
  };
  const take = (files) => page.locator("#import-file").setInputFiles(files);
  await check("a chat is saved as Markdown", async () => {
    const text = readFileSync(await saved(() => menu(page, "Save as Markdown"), "chat.md"), "utf8");
    return text.includes("# Save this") && text.includes("**bold**");
  });
  await check("all chats are saved, and imported as new ones", async () => {
    const file = await saved(() => page.locator("#export-all").click(), "chats.json");
    await take(file);
    await page.locator(".notice", { hasText: "1 chat imported" }).waitFor();
    await same(await bodies(page), ["Save this", "bold"]);
    return same(await chats(page), ["Save this", "Save this"]);
  });
  for (const [name, text] of [["nothing", ""], ["no JSON", "{"], ["no chats", "{}"], ["other things", '{"chats": [3, {"messages": [null]}]}']]) {
    await check(`a file of ${name} is refused in words`, async () => {
      await take({ name: "odd.json", mimeType: "application/json", buffer: Buffer.from(text) });
      await page.locator(".notice", { hasText: /not imported|0 chats imported/ }).waitFor();
      const count = (await chats(page)).length;
      await page.getByRole("button", { name: "Close this notice" }).click();
      return count === 2;
    });
  }
  await page.context().close();
}

/** Waits until the page's database has a message with a text. */
const stored = (page, text) => page.waitForFunction((wanted) => new Promise((resolve, reject) => {
  const opening = indexedDB.open("forebay-chats");
  opening.onerror = () => reject(opening.error);
  opening.onsuccess = () => {
    const reading = opening.result.transaction("messages").objectStore("messages").getAll();
    reading.onsuccess = () => {
      opening.result.close();
      resolve(reading.result.some(({ content }) => content === wanted));
    };
  };
}), text);

/** Puts records into the page's database as another program or a fault might. */
const put = (page, table, values) => page.evaluate(([name, list]) => new Promise((resolve, reject) => {
  const opening = indexedDB.open("forebay-chats");
  opening.onsuccess = () => {
    const transaction = opening.result.transaction(name, "readwrite");
    for (const value of list) transaction.objectStore(name).put(value);
    transaction.oncomplete = () => resolve(opening.result.close());
    transaction.onabort = () => reject(transaction.error);
  };
}), [table, values]);

async function damage({ check, fresh, relay, browser, url, complaints }) {
  const page = await fresh();
  relay.script = (_, response) => response.end(delta("Fine.") + event("[DONE]"));
  await check("damaged records are set aside and said, and the others stay", async () => {
    await ask(page, "Whole");
    await idle(page);
    const [, chat] = (await page.evaluate(() => location.hash)).split("#");
    await put(page, "messages", [{ id: "a", chat, order: "x" }, { id: "b", chat, order: 9, role: "user", content: { evil: 1 } }, { id: "c" }, { id: "d", chat: 7 }]);
    await put(page, "chats", [{ id: "e" }, { id: "f", title: 5 }]);
    await put(page, "messages", [{ id: "g", chat: "lost", order: 1, role: "user", content: "I have no chat" }]);
    await page.reload();
    await page.locator(".notice", { hasText: "6 stored records are damaged" }).waitFor();
    await same(await bodies(page), ["Whole", "Fine."]);
    await page.locator("#chats button", { hasText: "I have no chat" }).waitFor();
    return same([...(await chats(page))].sort(), ["I have no chat", "Whole"]);
  });
  await check("they can be saved", async () => {
    const coming = page.waitForEvent("download");
    await page.getByRole("button", { name: "Save as a file" }).click();
    const list = JSON.parse(readFileSync(await (await coming).path(), "utf8"));
    return list.length === 6 && list.every(({ why, value }) => why && value);
  });
  await check("the page works after that", async () => {
    await ask(page, "Still?");
    await idle(page);
    return same((await bodies(page)).at(-1), "Fine.");
  });
  await page.context().close();

  const olds = {
    "a conversation": [JSON.stringify({ messages: [{ role: "user", content: "old" }, { role: "assistant", content: "kept" }], system: "S", temperature: "0.5" }), ["old", "kept"], 0],
    "one with damaged parts": ['{"messages": [null, {"role": 5}, {"role": "user", "content": "old"}], "temperature": {"a": 1}}', ["old"], 2],
    "no conversation": ['{"messages": 5}', [], 1],
    "no JSON": ["{broken", [], 1],
  };
  for (const [name, [text, wanted, bad]] of Object.entries(olds)) {
    await check(`the older page's storage with ${name} leaves a page that works`, async () => {
      const context = await browser.newContext();
      const old = await context.newPage();
      old.on("pageerror", (error) => complaints.push(error.message));
      await old.route("**/page/main.js", (route) => route.fulfill({ contentType: "text/javascript", body: "" }));
      await old.goto(url);
      await old.evaluate((value) => localStorage.setItem("forebay-chat", value), text);
      await old.unroute("**/page/main.js");
      await old.goto(`${url}/?`);
      if (bad) await old.locator(".notice", { hasText: /damaged/ }).waitFor();
      if (wanted.length) await old.locator("#messages .message").nth(wanted.length - 1).waitFor();
      await same(await bodies(old), wanted);
      await ask(old, "new");
      await old.locator("#messages .body", { hasText: "Fine." }).waitFor();
      const left = await old.evaluate(() => localStorage.getItem("forebay-chat"));
      await context.close();
      return left === null;
    });
  }
  for (const [name, script] of [
    ["no database", "Object.defineProperty(window, 'indexedDB', { get() { throw new Error('forbidden'); } })"],
    ["no storage at all", "for (const name of ['indexedDB', 'localStorage', 'sessionStorage']) Object.defineProperty(window, name, { get() { throw new Error('forbidden'); } })"],
    ["a full disk", "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }"],
  ]) {
    await check(`a browser with ${name} still has a chat, and says so`, async () => {
      const context = await browser.newContext();
      await context.addInitScript(script);
      const poor = await context.newPage();
      poor.on("pageerror", (error) => complaints.push(error.message));
      await poor.goto(url);
      await poor.waitForFunction(() => document.getElementById("model").options.length > 0);
      await ask(poor, "Hello");
      await poor.locator("#messages .body", { hasText: "Fine." }).waitFor();
      await ask(poor, "Again");
      await poor.locator("#messages .message").nth(3).waitFor();
      const said = await poor.locator(".notice").count();
      await context.close();
      return said >= 1;
    });
  }
}

const SHOWN = [
  "## Projectile motion\n\nWithout air, the height is $y = v_0 t - \\frac{1}{2} g t^2$, so the flight takes",
  "$$t = \\frac{2 v_0 \\sin\\theta}{g}$$",
  "1. Choose a step.\n\n   A short one is more exact.\n\n2. Add up:\n   - the **speed**\n   - the *height*",
  "```python\ndef height(v, t, g=9.81):\n    # metres\n    return v * t - 0.5 * g * t ** 2\n\nprint(f\"{height(20, 1.5):.2f} m\")\n```",
  "| angle | range |\n| --- | ---: |\n| 30° | 35.3 m |\n| 45° | 40.8 m |",
].join("\n\n");

async function looks({ check, fresh, relay, pictures }) {
  relay.script = (_, response) => response.end(delta(SHOWN) + event({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }], usage: { completion_tokens: 212 } }) + event("[DONE]"));
  for (const [width, scheme] of [[1200, "light"], [1200, "dark"], [390, "light"], [390, "dark"]]) {
    const page = await fresh({ viewport: { width, height: 900 }, colorScheme: scheme });
    await check(`formulas, loose lists and coloured code: ${width} pixels, ${scheme}`, async () => {
      await ask(page, "How far does a ball fly?");
      await page.locator(".formula math").nth(1).waitFor();
      for (const part of [".formula math", "ol:not(.tight) > li > p", "ul.tight", ".code-keyword", ".code-comment", "td.right"]) {
        if ((await page.locator(`#messages ${part}`).count()) === 0) throw new Error(`no ${part}`);
      }
      return page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth);
    });
    await page.screenshot({ path: join(pictures, `formulas-${width}-${scheme}.png`) });
    if (width < 800) {
      await check(`the list of chats is a drawer: ${width} pixels, ${scheme}`, async () => {
        await page.locator("#side-toggle").click();
        await page.locator("#chats button").first().waitFor();
        await page.waitForTimeout(300);
        await page.screenshot({ path: join(pictures, `list-${width}-${scheme}.png`) });
        await page.keyboard.press("Escape");
        return (await page.evaluate(() => document.activeElement.id)) === "side-toggle" && !(await page.locator("#side").isVisible());
      });
    }
    await page.context().close();
  }
  const page = await fresh();
  // Tens of thousands of list items take a busy machine a while. A page that never answers again still fails.
  page.setDefaultTimeout(300_000);
  await check("odd answers of 256 KB leave a page that answers", async () => {
    for (const part of ["[a](", "**a", "``a ", "> - ", "|a", "$x$ ", "\\(", "http://", "  - b\n", "*a **b "]) {
      relay.script = (_, response) => response.end(delta(part.repeat(Math.ceil(256_000 / part.length))) + event("[DONE]"));
      await page.locator("#new-chat").click();
      await ask(page, part);
      await idle(page);
      await page.locator("#new-chat").click();
    }
  });
  await check("formulas that are deep or wrong stay as they were written, and the page goes on", async () => {
    const odd = ["\\sqrt{".repeat(500) + "x" + "}".repeat(500), "\\frac{1}{".repeat(400) + "x" + "}".repeat(400), "{".repeat(1900) + "}".repeat(1900), "x^{".repeat(900) + "}".repeat(900), "\\left(".repeat(600), "\\def\\a{\\a\\a}\\a", "\\nothing", "\\href{javascript:window.evil=1}{x}", "\\includegraphics{https://example.com/x.png}", "&".repeat(3900)];
    relay.script = (_, response) => response.end(odd.map((source) => delta(`$$${source}$$\n\n`)).join("") + delta("The end, $z$.") + event("[DONE]"));
    await ask(page, "Deep?");
    await page.locator("#messages .body", { hasText: "The end" }).waitFor();
    await page.locator("#messages .formula math", { hasText: "z" }).last().waitFor();
    if ((await page.locator("#messages .formula :is(a, img)").count()) > 0) return false;
    return (await page.locator("#messages .formula.unread").count()) > 3;
  });
  await page.context().close();
}
