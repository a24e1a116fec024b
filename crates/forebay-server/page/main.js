// Starts the page: tabs, key, and what the header shows.

import { hasKey, KeyNeeded, request, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { showLive } from "./live.js";

const get = (id) => document.getElementById(id);
const TABS = ["chat", "live"];
/** Time between two looks at the machine, in milliseconds. */
const LOOK_EVERY = 500;

const chat = startChat({ askForKey, moved: address });

/** Lets the address name what is shown, so that a reload and the browser's arrows find it. */
function address() {
  const hash = `#${get("live").hidden ? chat.hash() : "machine"}`;
  if (location.hash === hash) return;
  const known = location.hash && location.hash !== "#machine" && location.hash !== "#new";
  if (known && hash !== "#machine") history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

addEventListener("popstate", async () => {
  const name = location.hash.slice(1);
  choose(name === "machine" ? "live" : "chat", false);
  await chat.ready;
  if (name && name !== "machine" && name !== chat.hash()) chat.open(name);
});

function choose(name, moves = true) {
  for (const tab of TABS) {
    const chosen = tab === name;
    get(tab).hidden = !chosen;
    get(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    get(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  if (moves) address();
}

for (const tab of TABS) {
  const button = get(`tab-${tab}`);
  button.addEventListener("click", () => choose(tab));
  button.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = TABS[(TABS.indexOf(tab) + 1) % TABS.length];
    choose(other);
    get(`tab-${other}`).focus();
  });
}

function askForKey() {
  get("key-error").textContent = hasKey() ? "The server refused this key." : "";
  document.querySelector("main").hidden = true;
  get("key-form").hidden = false;
  get("key").focus();
}

get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(get("key").value.trim());
  get("key").value = "";
  get("key-form").hidden = true;
  document.querySelector("main").hidden = false;
  look();
});

let known = "";

/** Asks the server what it does, shows it, and asks again later. */
async function look() {
  try {
    const live = await (await request("/live")).json();
    get("live-error").textContent = "";
    const names = live.models.map((model) => model.name);
    if (names.join("\n") !== known) {
      known = names.join("\n");
      chat.setModels(names);
    }
    const rate = live.models.reduce((sum, model) => sum + model.rates.generated_tokens, 0);
    get("pulse").textContent = rate > 0 ? `${rate.toFixed(1)} tokens/s` : "idle";
    if (!get("live").hidden) showLive(get("models"), live);
  } catch (error) {
    if (error instanceof KeyNeeded) return askForKey();
    get("pulse").textContent = "no connection";
    get("live-error").textContent = `The server does not answer: ${error.message}`;
  }
  setTimeout(look, document.hidden ? 10 * LOOK_EVERY : LOOK_EVERY);
}

choose(location.hash === "#machine" ? "live" : "chat", false);
look();
