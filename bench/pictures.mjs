#!/usr/bin/env node
// Makes the pictures of the README and the pages: a chat in a terminal, an assessment, and the web page, all with the demo model.
//
//     NODE_PATH=FOLDER/node_modules bench/pictures.mjs FOREBAY [OUT]
//
// FOREBAY is the program, OUT a folder (default: docs/images). ADDRESS names a server of the demo model for the page; without it, one is
// started. Needs tmux, Chromium (CHROMIUM, default: /usr/bin/chromium) and playwright-core in FOLDER. Look at what it made: the demo
// model's stories differ in how good they are.

import { execFileSync, spawn } from "node:child_process";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const require = createRequire(process.env.NODE_PATH ? `${process.env.NODE_PATH}/` : import.meta.url);
const { chromium } = require("playwright-core");

const root = resolve(dirname(fileURLToPath(import.meta.url)), "..");
const program = resolve(process.argv[2]);
const out = resolve(process.argv[3] ?? join(root, "docs/images"));
const MODEL = "models/tales-moe-sticky-Q4_K_M.gguf";
const STORY = "The old man sat by the fire, and the children came near to hear the story. \"Once,\" he said, \"there was a fox who";
const COLOURS = ["#6e7681", "#ff7b72", "#7ee787", "#d29922", "#79c0ff", "#d2a8ff", "#56d4dd", "#e6edf3"];

const wait = (milliseconds) => new Promise((next) => setTimeout(next, milliseconds));

/** Types lines into a shell in a terminal of a size, each after the text that it waits for, and returns the screen with its colours. */
async function terminal(columns, rows, lines) {
  const tmux = (...words) => execFileSync("tmux", ["-L", `pictures-${process.pid}`, ...words], { encoding: "utf8" });
  tmux("new-session", "-d", "-x", String(columns), "-y", String(rows), "-c", root, "env", "TERM=xterm-256color", "PS1=$ ", "bash", "--norc", "--noprofile");
  try {
    tmux("send-keys", `alias forebay='${program}'; clear`, "Enter");
    await wait(1000);
    for (const [line, until] of lines) {
      tmux("send-keys", "-l", line);
      tmux("send-keys", "Enter");
      for (let round = 0; !until.test(tmux("capture-pane", "-p").trimEnd()); round++) {
        if (round > 600) throw new Error(`${line}: the terminal never showed ${until}`);
        await wait(200);
      }
    }
    return tmux("capture-pane", "-e", "-p").trimEnd().replace(/\n\$ ?$/, "");
  } finally {
    tmux("kill-server");
  }
}

/** Makes HTML of text with colours as terminals write them. */
function html(text) {
  let style = {};
  const parts = text.split(/\x1b\[([\d;]*)m/).map((part, index) => {
    if (index % 2 === 0) {
      const escaped = part.replace(/[&<>]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[char]);
      const css = Object.entries(style).map(([name, value]) => `${name}:${value}`).join(";");
      return css && escaped ? `<span style="${css}">${escaped}</span>` : escaped;
    }
    for (const code of part.split(";").map(Number)) {
      if (code === 0) style = {};
      else if (code === 1) style["font-weight"] = "bold";
      else if (code === 2) style.opacity = "0.65";
      else if (code === 22) delete style["font-weight"], delete style.opacity;
      else if (code === 39) delete style.color;
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) style.color = COLOURS[code % 10];
    }
    return "";
  });
  return parts.join("");
}

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--headless", "--no-sandbox", "--disable-gpu"] });

async function picture(name, text) {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  await page.setContent(`<style>body{margin:0;width:max-content}pre{margin:0;padding:18px 22px;background:#0d1117;color:#e6edf3;font:12px/1.35 "DejaVu Sans Mono",monospace}</style><pre>${html(text)}</pre>`);
  await page.locator("pre").screenshot({ path: join(out, name) });
  await page.close();
}

/** Starts a server, and returns it with its address. */
async function serve() {
  const server = spawn(program, ["serve", MODEL, "--ram", "18MiB", "--port", "0"], { cwd: root, stdio: ["ignore", "ignore", "pipe"] });
  let log = "";
  const address = await new Promise((found, failed) => {
    server.on("exit", () => failed(new Error(log)));
    server.stderr.on("data", (data) => {
      log += data;
      const [url] = /http:\/\/127[^\s,]+\d/.exec(log) ?? [];
      if (url) found(url);
    });
  });
  return { server, address };
}

async function webPage(name, address) {
  const page = await browser.newPage({ viewport: { width: 1100, height: 620 } });
  await page.goto(address);
  await page.waitForFunction(() => document.getElementById("model").options.length > 0);
  await page.locator("#settings summary").click();
  await page.locator("#max_tokens").fill("120");
  await page.locator("#temperature").fill("0.7");
  await page.locator("#settings summary").click();
  for (const text of ["The old lighthouse keeper", "A letter that came too late", "Two brothers and a boat", STORY]) {
    await page.locator("#new-chat").click();
    await page.locator(".empty").waitFor();
    await page.locator("#prompt").fill(text);
    await page.locator("#prompt").press("Enter");
    await page.locator(".foot").waitFor({ timeout: 120_000 });
  }
  // The demo model has also read manuals, and here a story is wanted.
  for (let round = 0; round < 12 && /[#`*|_=<]|http/.test(await page.locator("#messages .body").last().innerText()); round++) {
    await page.getByRole("button", { name: "Retry" }).click();
    await page.locator("#stop").waitFor({ state: "visible" });
    await page.locator(".foot").waitFor({ timeout: 120_000 });
  }
  await page.mouse.move(5, 5);
  await page.locator("#pulse", { hasText: "tokens/s" }).waitFor();
  await page.screenshot({ path: join(out, name) });
}

const prompt = /\n\$$/;
await picture("chat.png", await terminal(96, 40, [
  [`forebay run ${MODEL} --ram 18MiB -n 110 --seed 3 --stats`, /^> ?$/m],
  ["Once upon a time there was a fox who", /\S[\s\S]*\n> ?$/],
  ["/bye", prompt],
]));
await picture("assess.png", await terminal(112, 60, [[`forebay assess ${MODEL}`, prompt]]));
const { server, address } = process.env.ADDRESS ? { address: process.env.ADDRESS } : await serve();
try {
  await webPage("page.png", address);
} finally {
  server?.kill();
}
await browser.close();
