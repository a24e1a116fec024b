#!/usr/bin/env node
// Runs the npm packages `openai` and `ollama` against a running `forebay serve`.
//
//     NODE_PATH=FOLDER/node_modules bench/server-clients.mjs [ADDRESS]
//
// ADDRESS is http://127.0.0.1:8080 unless given. FOLDER is where the packages are installed (npm i openai ollama). Prints one line for
// each check. Exit status 1 if one failed.

import { createRequire } from "node:module";

const require = createRequire(process.env.NODE_PATH ? `${process.env.NODE_PATH}/` : import.meta.url);
const OpenAI = require("openai").default;
const { Ollama } = require("ollama");

const address = process.argv[2] ?? "http://127.0.0.1:8080";
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none" });
const local = new Ollama({ host: address });
const messages = [{ role: "user", content: "Once upon a time there was" }];
const schema = {
  type: "object",
  properties: { legs: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["legs"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "look", description: "Looks", parameters: schema } }];
let failed = 0;

// Runs one check, which returns something to show, or false if it failed.
async function check(name, work) {
  let shown;
  try {
    shown = await work();
  } catch (error) {
    shown = `${error.name}: ${String(error.message).slice(0, 300)}`;
    failed += 1;
    console.log("FAIL", name, shown);
    return;
  }
  const fine = shown !== false && shown !== undefined;
  failed += fine ? 0 : 1;
  console.log(fine ? "pass" : "FAIL", name, JSON.stringify(shown));
}

// Returns what `value` says about the error that the work must end with.
async function refused(work, value) {
  try {
    await work();
  } catch (error) {
    return value(error);
  }
  return false;
}

const model = (await client.models.list()).data[0].id;
const ask = (more) => client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, ...more });

await check("openai: chat", async () => (await ask({})).choices[0].message.content);
await check("openai: chat in parts", async () => {
  let text = "";
  for await (const part of await ask({ stream: true })) text += part.choices[0]?.delta?.content ?? "";
  return text === (await ask({})).choices[0].message.content;
});
await check("openai: tools", async () => (await ask({ tools })).choices[0].finish_reason);
await check("openai: JSON by a schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "fox", schema, strict: true } };
  return JSON.parse((await ask({ max_tokens: 60, response_format })).choices[0].message.content).legs <= 9;
});
await check("openai: response in parts", async () => {
  const options = { model, input: "Once upon a time", max_output_tokens: 8, temperature: 0 };
  let text = "";
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return text === (await client.responses.create(options)).output_text;
});
await check("openai: unknown model", () => refused(() => ask({ model: "none" }), (error) => error.status === 404 && error.code));
await check("openai: wrong value", () => refused(() => ask({ temperature: 9 }), (error) => error.status === 400 && error.param));

const few = { num_predict: 5, temperature: 0 };
await check("ollama: list", async () => (await local.list()).models[0].model);
await check("ollama: show", async () => (await local.show({ model })).capabilities);
await check("ollama: chat in parts", async () => {
  let text = "";
  for await (const part of await local.chat({ model, messages, options: few, stream: true })) text += part.message.content;
  return text === (await local.chat({ model, messages, options: few })).message.content;
});
await check("ollama: JSON by a schema", async () => {
  const answer = await local.chat({ model, messages, format: schema, options: { num_predict: 60 } });
  return JSON.parse(answer.message.content).legs <= 9;
});
await check("ollama: generate", async () => (await local.generate({ model, prompt: "Once", options: few })).eval_count === 5);
await check("ollama: unknown model", () => refused(() => local.chat({ model: "none", messages }), (error) => error.status_code === 404));
console.log(failed ? `${failed} failed` : "all passed");
process.exit(failed ? 1 : 0);
