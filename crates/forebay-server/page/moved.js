// Brings over the one conversation that older versions of the page kept in `localStorage`.

import { local } from "./kept.js";
import { readChat } from "./records.js";
import { adopt } from "./settings.js";

const OLD = "forebay-chat";

/** Moves the old conversation to the store. What cannot be read is set aside. Returns the id of its chat, if there is one. */
export async function moveOld(store) {
  const kept = local.get(OLD);
  if (kept === null) return null;
  let chat = null;
  try {
    const value = JSON.parse(kept);
    if (!Array.isArray(value?.messages)) throw new Error("it has no messages");
    const faults = [];
    const read = readChat(value, (_, why, message) => faults.push([why, message]));
    adopt(value);
    for (const [why, message] of faults) await store.keepDamaged(OLD, why, message);
    if (read) chat = await put(store, read);
  } catch (error) {
    await store.keepDamaged(OLD, error.message, kept);
  }
  // Without a database, the old place is the only one that lasts.
  if (!store.reason) local.remove(OLD);
  return chat;
}

/** Two tabs that do this at once write the same records. */
async function put(store, [chat, messages]) {
  chat.id = OLD;
  messages.forEach((message, index) => Object.assign(message, { id: `${OLD}-${index}`, chat: OLD }));
  await store.putChat(chat, messages);
  return OLD;
}
