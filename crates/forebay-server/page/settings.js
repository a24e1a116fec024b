// The system prompt and the sampling of requests, the same in all tabs.

import { local } from "./kept.js";
import { get } from "./ui.js";

const KEY = "forebay-settings";
const NUMBERS = ["temperature", "top_p", "max_tokens"];
const FIELDS = ["system", ...NUMBERS];

export function startSettings() {
  fill(local.get(KEY));
  for (const field of FIELDS) get(field).addEventListener("input", keep);
  addEventListener("storage", (event) => event.key === KEY && fill(event.newValue));
}

/** Takes the settings of the page's older form. */
export function adopt(values) {
  if (local.get(KEY) !== null) return;
  fill(JSON.stringify(values));
  keep();
}

function fill(kept) {
  let values = {};
  try {
    values = JSON.parse(kept) ?? {};
  } catch {
    // What is kept are no settings, so the fields stay empty.
  }
  for (const field of FIELDS) {
    if (document.activeElement === get(field)) continue;
    get(field).value = typeof values[field] === "string" ? values[field] : "";
    if (!get(field).checkValidity()) get(field).value = "";
  }
}

function keep() {
  local.set(KEY, JSON.stringify(Object.fromEntries(FIELDS.map((field) => [field, get(field).value]))));
}

export const system = () => get("system").value;

/** Returns the numbers that the user chose. */
export function sampling() {
  return Object.fromEntries(NUMBERS.filter((field) => get(field).value !== "").map((field) => [field, Number(get(field).value)]));
}

/** Shows the first field that is wrong. Returns false if all are right. */
export function showWrong() {
  const wrong = NUMBERS.map(get).find((field) => !field.checkValidity());
  if (!wrong) return false;
  get("settings").open = true;
  wrong.reportValidity();
  return true;
}
