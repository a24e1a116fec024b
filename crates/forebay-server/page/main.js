// Starts the page: tabs, key, and what the header shows.

import { hasKey, KeyNeeded, request, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { showLive } from "./live.js";

const get = (id) => document.getElementById(id);
const TABS = ["chat", "live"];
/** Time between two looks at the machine, in milliseconds. */
const LOOK_EVERY = 500;

const chat = startChat({ askForKey });

function choose(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    get(tab).hidden = !chosen;
    get(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    get(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : "#machine");
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

choose(location.hash === "#machine" ? "live" : "chat");
look();
