#!/usr/bin/env node
// Checks the web page of a running `forebay serve` in Chromium, and saves pictures of it.
//
//     NODE_PATH=FOLDER/node_modules bench/page-check.mjs [ADDRESS] [PICTURES]
//
// ADDRESS is http://127.0.0.1:8080 unless given, and PICTURES is a folder (default: page-pictures in the system's folder for temporary
// files). FOLDER is where the package is installed (npm i playwright-core). CHROMIUM names the browser (default: /usr/bin/chromium), KEY
// an API key if the server wants one. Prints one line for each check. Exit status 1 if one failed.

import { createRequire } from "node:module";
import { mkdirSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { checkChats, taken } from "./page-chats.mjs";

const require = createRequire(process.env.NODE_PATH ? `${process.env.NODE_PATH}/` : import.meta.url);
const { chromium } = require("playwright-core");

const address = process.argv[2] ?? "http://127.0.0.1:8080";
const pictures = process.argv[3] ?? join(tmpdir(), "page-pictures");
const key = process.env.KEY;
mkdirSync(pictures, { recursive: true });
let failed = 0;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});

// Runs one check, which returns false or throws if it failed.
async function check(name, work) {
  let why = "";
  try {
    if ((await work()) === false) why = "not so";
  } catch (error) {
    why = String(error.message).split("\n")[0].slice(0, 300);
  }
  failed += why ? 1 : 0;
  console.log(why ? "FAIL" : "pass", name, why);
}

const outside = [];
const complaints = [];

// Opens the page in a profile of its own.
async function open(width, scheme, { state = null, answers = {} } = {}) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
  const page = await context.newPage();
  await context.route("**/*", (route) => {
    const url = new URL(route.request().url());
    if (url.origin === new URL(address).origin || url.protocol === "data:") return route.fallback();
    outside.push(url.href);
    return route.abort();
  });
  for (const [path, answer] of Object.entries(answers)) await context.route(`${address}${path}`, (route) => route.fulfill(answer));
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.message));
  if (state) await page.addInitScript((text) => localStorage.setItem("forebay-chat", text), JSON.stringify(state));
  if (key) await page.addInitScript((text) => sessionStorage.setItem("forebay-key", text), key);
  await page.goto(address);
  await page.waitForFunction(() => document.getElementById("model").options.length > 0);
  return page;
}

const fits = (page) => page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth);
// Waits until what was sent is answered.
async function done(page) {
  await taken(page);
  await page.locator("#send").waitFor({ state: "visible", timeout: 60000 });
}
const lastBody = (page) => page.locator("#messages .message").last().locator(".body");
const set = (page, field, value) => page.evaluate(([id, text]) => {
  const node = document.getElementById(id);
  node.value = text;
  node.dispatchEvent(new Event("input"));
}, [field, value]);

// A stream of a model that sends what the parts say.
const stream = (...deltas) => ({
  contentType: "text/event-stream",
  body: [...deltas.map((delta) => JSON.stringify({ choices: [{ index: 0, delta }] })), "[DONE]"].map((data) => `data: ${data}\n\n`).join(""),
});

const EVIL = [
  "<img src=x onerror=\"window.evil=1\"> <script>window.evil=2</script>",
  "[link](javascript:window.evil=3) [data](data:text/html,<script>window.evil=4</script>) ![x](https://example.com/x.png)",
  "`<b onclick=window.evil=5>`",
  "```html\n<script>window.evil=6</script>\n```",
  "| <img src=x onerror=window.evil=7> | b |\n| --- | --- |\n| 1 | 2 |",
  "# <svg onload=window.evil=8>",
  "> ".repeat(5000),
].join("\n\n");

const RICH = [
  "## A table and a list", "Text with **bold**, *emphasis*, `code` and a [link](https://example.com/a).",
  "| layer | hits |\n| --- | ---: |\n| 0 | 91 % |\n| 1 | 88 % |", "1. one\n2. two\n   - inner\n   - second",
  "> quoted", "```rust\nfn main() {\n    println!(\"a long line of code that does not fit on a telephone, so that it has to scroll\");\n}\n```",
].join("\n\n");

await check("headers forbid other hosts and inline scripts", async () => {
  for (const path of ["/", "/page/main.js"]) {
    const answer = await fetch(address + path, { headers: { Accept: "text/html" } });
    const policy = answer.headers.get("content-security-policy");
    if (answer.status !== 200 || !policy.includes("default-src 'none'") || policy.includes("unsafe")) return false;
    if (answer.headers.get("x-content-type-options") !== "nosniff") return false;
  }
});

const page = await open(1400, "light");
await check("an empty chat says so", () => page.locator(".empty").waitFor());
await page.screenshot({ path: join(pictures, "chat-empty-1400-light.png") });
await check("Enter sends, and an answer comes", async () => {
  await set(page, "max_tokens", "24");
  await page.locator("#prompt").focus();
  await page.keyboard.type("Once upon");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("a time");
  if ((await page.locator("#prompt").inputValue()) !== "Once upon\na time") return false;
  await page.keyboard.press("Enter");
  await done(page);
  return (await lastBody(page).textContent()).length > 0 && (await page.locator(".foot").textContent()).includes("tokens");
});
await check("Retry answers again", async () => {
  await page.getByRole("button", { name: "Retry" }).click();
  await page.getByText("The old answer is replaced.").waitFor();
  return (await page.locator(".message").count()) === 2;
});
await check("Esc stops, and the text so far stays", async () => {
  await set(page, "max_tokens", "3000");
  await page.locator("#prompt").fill("Tell a long story");
  await page.keyboard.press("Enter");
  await page.locator("#stop").waitFor({ state: "visible" });
  await page.waitForFunction(() => [...document.querySelectorAll(".message .body")].at(-1).textContent.length > 5);
  await page.keyboard.press("Escape");
  await done(page);
  return (await lastBody(page).textContent()).length > 5 && (await page.locator(".foot").textContent()).includes("Stopped");
});
await check("the Stop button stops", async () => {
  await page.getByRole("button", { name: "Retry" }).click();
  await page.locator("#stop").click();
  await done(page);
  return (await page.locator(".foot").textContent()).includes("Stopped");
});
await check("a stopped request leaves the server", async () => {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  for (let round = 0; round < 50; round++) {
    const live = await (await fetch(`${address}/live`, { headers })).json();
    if (live.models.every((model) => model.queue.running === 0)) return;
    await new Promise((next) => setTimeout(next, 100));
  }
  return false;
});
await check("a reload keeps the conversation", async () => {
  const before = await page.locator(".message").count();
  await page.reload();
  await page.locator(".message").first().waitFor();
  return (await page.locator(".message").count()) === before;
});
await check("a wrong setting is refused in the page", async () => {
  await set(page, "temperature", "9");
  await page.locator("#prompt").fill("x");
  await page.keyboard.press("Enter");
  const open = await page.locator("#settings").evaluate((node) => node.open);
  await set(page, "temperature", "");
  await page.locator("#settings summary").click();
  return open && (await page.locator("#send").isVisible());
});
await check("New chat keeps the old one in the list", async () => {
  await page.locator("#new-chat").click();
  await page.locator(".empty").waitFor();
  return (await page.locator("#chats button").count()) === 1;
});
await check("system prompt and sampling are sent", async () => {
  await set(page, "system", "Be brief.");
  await set(page, "temperature", "0");
  await set(page, "top_p", "0.5");
  await set(page, "max_tokens", "5");
  const sent = page.waitForRequest(`${address}/v1/chat/completions`);
  await page.locator("#prompt").fill("x");
  await page.keyboard.press("Enter");
  const body = (await sent).postDataJSON();
  await done(page);
  return body.messages[0].role === "system" && body.temperature === 0 && body.top_p === 0.5 && body.max_tokens === 5;
});
await check("keys reach the tabs, and arrows change them", async () => {
  await page.locator("#tab-chat").focus();
  await page.keyboard.press("ArrowRight");
  return (await page.locator("#live").isVisible()) && (await page.evaluate(() => document.activeElement.id)) === "tab-live";
});
await page.context().close();

// While an answer is generated, the view of the machine has something to show.
let working = true;
async function work() {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const body = JSON.stringify({ prompt: "Once upon a time there was a fox", max_tokens: 200, ignore_eos: true });
  while (working) {
    const answer = await fetch(`${address}/v1/completions`, { method: "POST", headers, body });
    if (!answer.ok) throw new Error(await answer.text());
    await answer.text();
  }
}
const works = Promise.all([work(), work()]);
works.catch((error) => check("the server works", () => Promise.reject(error)));
for (const [width, scheme] of [[400, "light"], [400, "dark"], [1400, "light"], [1400, "dark"]]) {
  const name = `${width} pixels, ${scheme}`;
  const busy = await open(width, scheme);
  await busy.locator("#tab-live").click();
  await check(`the machine's view shows work: ${name}`, async () => {
    await busy.waitForFunction(() => parseFloat(document.querySelector(".fact .value")?.textContent) > 0, null, { timeout: 20000 });
    await busy.waitForTimeout(1500);
    return fits(busy);
  });
  if (await busy.locator(".heat").isVisible()) {
    await check(`keys read the map of experts: ${name}`, async () => {
      await busy.locator("canvas").focus();
      await busy.keyboard.press("ArrowRight");
      await busy.keyboard.press("ArrowRight");
      return (await busy.locator(".tip").textContent()).startsWith("Layer 0, expert 1:") || busy.locator(".tip").textContent().then((text) => Promise.reject(new Error(text)));
    });
  }
  // The view scrolls within the page, so a tall window shows all of it.
  const size = await busy.locator("#live").evaluate((node) => node.scrollHeight);
  await busy.setViewportSize({ width, height: Math.max(900, size + 80) });
  await busy.waitForTimeout(700);
  await busy.screenshot({ path: join(pictures, `machine-${width}-${scheme}.png`) });
  await busy.context().close();

  const answers = { "/v1/chat/completions": stream({ reasoning_content: "First I think." }, { content: RICH }) };
  const rich = await open(width, scheme, { answers });
  await rich.locator("#prompt").fill("Show me what you can write");
  await rich.keyboard.press("Enter");
  await done(rich);
  await check(`Markdown and folded thinking: ${name}`, async () => {
    const body = lastBody(rich);
    for (const part of ["h2", "strong", "em", "table", "ol ul", "blockquote", "pre", "a[target=_blank][rel~=noopener]"]) {
      if ((await body.locator(part).count()) === 0) throw new Error(`no ${part}`);
    }
    const open = await rich.locator(".thinking").evaluate((node) => node.open);
    return !open && (await fits(rich));
  });
  await rich.screenshot({ path: join(pictures, `chat-${width}-${scheme}.png`) });
  await rich.context().close();
}

working = false;
await works.catch(() => {});

await check("HTML and scripts of a model are text", async () => {
  const name = "<img src=x onerror=window.evil=9>";
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const live = await (await fetch(`${address}/live`, { headers })).json();
  live.models[0].name = name;
  live.models[0].device = name;
  const answers = {
    "/v1/chat/completions": stream({ reasoning_content: EVIL }, { content: EVIL }),
    "/live": { contentType: "application/json", body: JSON.stringify(live) },
  };
  const evil = await open(1400, "light", { answers });
  await evil.locator("#prompt").fill(EVIL);
  await evil.keyboard.press("Enter");
  await done(evil);
  await evil.locator("#tab-live").click();
  await evil.waitForFunction((text) => document.querySelector(".card h2")?.textContent === text, name);
  const found = await evil.evaluate(() => ({
    evil: window.evil,
    nodes: document.querySelectorAll("#messages :is(script, img, svg, [onerror], [onclick]), #models :is(script, img)").length,
    links: [...document.querySelectorAll("#messages a")].filter((link) => !/^https?:/.test(link.href)).length,
  }));
  await evil.context().close();
  if (found.evil !== undefined || found.nodes || found.links) throw new Error(JSON.stringify(found));
});
await check("several models have cards and options of their own", async () => {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const live = await (await fetch(`${address}/live`, { headers })).json();
  live.models.push({ ...live.models[0], name: "second" });
  const two = await open(1400, "light", { answers: { "/live": { contentType: "application/json", body: JSON.stringify(live) } } });
  await two.locator("#tab-live").click();
  await two.locator(".card").nth(1).waitFor();
  const options = await two.locator("#model option").count();
  await two.context().close();
  return options === 2;
});
await check("a refused request is told in words", async () => {
  const answer = { status: 429, contentType: "application/json", body: JSON.stringify({ error: { message: "the queue is full" } }) };
  const full = await open(400, "light", { answers: { "/v1/chat/completions": answer } });
  await full.locator("#prompt").fill("x");
  await full.keyboard.press("Enter");
  await full.locator(".failure", { hasText: "the queue is full" }).waitFor();
  await full.context().close();
});
await checkChats({ browser, address, check, pictures, complaints });
// The browser itself writes a line for each refused request.
const unexpected = complaints.filter((text) => !text.includes("429"));
await check("the browser complains about nothing", () => unexpected.length === 0 || Promise.reject(new Error(unexpected.join("; "))));
await check("no request goes to another host", () => outside.length === 0 || Promise.reject(new Error(outside.join(" "))));

await check("a server with keys gets the key from the user", async () => {
  const context = await browser.newContext({ viewport: { width: 400, height: 900 } });
  const asked = await context.newPage();
  let wanted = true;
  const refuse = { status: 401, contentType: "application/json", body: JSON.stringify({ error: { message: "the API key is wrong" } }) };
  const use = key ?? "secret";
  await context.route(`${address}/live`, (route) => {
    wanted = route.request().headers().authorization !== `Bearer ${use}`;
    return wanted ? route.fulfill(refuse) : route.fallback();
  });
  await asked.goto(address);
  await asked.locator("#key").waitFor();
  await asked.screenshot({ path: join(pictures, "key-400.png") });
  await asked.locator("#key").fill("wrong");
  await asked.keyboard.press("Enter");
  await asked.locator("#key-error", { hasText: "refused" }).waitFor();
  await asked.locator("#key").fill(use);
  await asked.keyboard.press("Enter");
  await asked.locator("#chat").waitFor();
  const kept = await asked.evaluate(() => [sessionStorage.length, JSON.stringify(localStorage)]);
  await context.close();
  return !wanted && kept[0] === 1 && !kept[1].includes(use);
});

await browser.close();
console.log(failed ? `${failed} failed` : "all passed", pictures);
process.exitCode = failed ? 1 : 0;
