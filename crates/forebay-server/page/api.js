// Requests to the server, with the key that the user gave.

import { session } from "./kept.js";

const KEY = "forebay-key";

export class KeyNeeded extends Error {}
/** The connection ended before the answer did. */
export class Cut extends Error {}

/** Sends a request. Throws an error with the server's words if it refuses. */
export async function request(path, options = {}) {
  const key = session.get(KEY);
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await reached(fetch(path, { ...options, headers }), "The server does not answer. Check that `forebay serve` runs.");
  if (response.ok) return response;
  const words = await errorOf(response);
  throw response.status === 401 ? new KeyNeeded(words) : new Error(words);
}

export function setKey(key) {
  session.set(KEY, key);
}

export function hasKey() {
  return session.get(KEY) !== null;
}

async function errorOf(response) {
  try {
    return String((await response.json()).error.message);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** Waits for the network, whose errors browsers word in different ways. */
async function reached(step, words) {
  try {
    return await step;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Cut(words);
  }
}

/** Yields the JSON of each event of a streamed answer. Throws `Cut` if the stream ends without its last event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const words = "The connection to the server broke off before the answer was complete.";
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reached(reader.read(), words);
      if (done) throw new Cut(words);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield parsed(data);
      }
    }
  } finally {
    // A server whose answer nobody reads any more stops it.
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Cut("The server sent something that is no part of an answer.");
  }
}
