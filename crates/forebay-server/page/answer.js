// Receives one answer into its message, and keeps what has come so far.

import { Cut, events, request } from "./api.js";

/** Time between two writes of a growing answer, in milliseconds. */
const KEEP_EVERY = 400;

/** What of a message changes while it is answered. */
export function changing({ content, reasoning, note, error, state, owner, model }) {
  return { content, reasoning, note, error, state, owner, model };
}

/**
 * Sends a request and adds its answer to the message, whose state says in the end how that went. `grown` is called when text came,
 * `keep` now and then; if `keep` returns false, the message is gone and the answer is stopped.
 */
export async function receive(message, wanted, { abort, grown, keep }) {
  const timer = setInterval(async () => (await keep()) || abort.abort(), KEEP_EVERY);
  try {
    await stream(message, wanted, abort.signal, grown);
  } catch (error) {
    failed(message, error);
    return error;
  } finally {
    clearInterval(timer);
  }
  return null;
}

function failed(message, error) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    message.note = "Stopped";
    return;
  }
  message.error = error.message;
  message.state = message.content || message.reasoning ? "cut" : "refused";
}

async function stream(message, wanted, signal, grown) {
  const options = { method: "POST", body: JSON.stringify(wanted), signal };
  const started = performance.now();
  let first = null;
  let reason = null;
  let usage = null;
  try {
    for await (const event of events(await request("/v1/chat/completions", options))) {
      if (event.error) throw new Error(String(event.error.message));
      const choice = event.choices?.[0];
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (first === null && (content || reasoning)) first = performance.now();
      message.content += content ?? "";
      message.reasoning += reasoning ?? "";
      reason = choice?.finish_reason ?? reason;
      usage = event.usage ?? usage;
      grown();
    }
  } catch (error) {
    // An answer that said why it ended is whole.
    if (!(error instanceof Cut && reason)) throw error;
  }
  message.state = reason === "length" ? "limit" : "done";
  message.note = note(usage, first ?? started, message.state);
}

function note(usage, first, state) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  if (tokens !== undefined) parts.push(`${tokens} tokens`);
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (state === "limit") parts.push("cut at the token limit");
  return parts.join(", ");
}
