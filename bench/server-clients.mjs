#!/usr/bin/env node
// Runs the npm packages `openai`, `@anthropic-ai/sdk`, `ollama` and `ai` (with `@ai-sdk/openai-compatible`, `@ai-sdk/openai` and
// `@ai-sdk/anthropic`) against a running `forebay serve`: streams, tools, schemas, errors.
//
//     NODE_PATH=FOLDER/node_modules bench/server-clients.mjs [ADDRESS]
//
// ADDRESS is http://127.0.0.1:8080 unless given. FOLDER is where the packages are installed; `.ci/clients` installs them. Checks all
// models of the server. As in bench/server-clients.py, a client that cannot force a call is checked with the model `caller`. Prints a
// table. Exit status 1 if a check failed.

import { createRequire } from "node:module";

const require = createRequire(process.env.NODE_PATH ? `${process.env.NODE_PATH}/` : import.meta.url);
const OpenAI = require("openai").default;
const Anthropic = require("@anthropic-ai/sdk").default;
const { Ollama } = require("ollama");
const { APICallError, embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");

const address = process.argv[2] ?? "http://127.0.0.1:8080";
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const claude = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const local = new Ollama({ host: address });
const messages = [{ role: "user", content: "Once upon a time there was" }];
const tooLong = [{ role: "user", content: "word ".repeat(20000) }];
const schema = {
  type: "object",
  properties: { legs: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["legs"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "look", description: "Looks", parameters: schema } }];
const results = new Map();

// Runs one check, which fails if it throws or returns anything but true.
async function check(name, model, what, work) {
  let why = "";
  try {
    const shown = await work();
    if (shown !== true) why = JSON.stringify(shown) ?? "undefined";
  } catch (error) {
    why = `${error.name}: ${String(error.message).slice(0, 300)}`;
  }
  const key = `${name} ${model}`;
  const [passed, failed] = results.get(key) ?? [0, 0];
  results.set(key, why === "" ? [passed + 1, failed] : [passed, failed + 1]);
  if (why !== "") console.log(`FAIL  ${name}, ${model}: ${what}: ${why}`);
}

// Returns true if the work ends with an error of which `isRight` says that it is the right one.
async function refused(work, isRight) {
  try {
    await work();
  } catch (error) {
    return isRight(error) === true || `another error: ${error.message}`;
  }
  return "no error";
}

// Returns true if a text, or what was read from one, has the form of the schema.
function legs(value) {
  const found = typeof value === "string" ? JSON.parse(value) : value;
  return Object.keys(found).join() === "legs" && Number.isInteger(found.legs) && found.legs >= 0 && found.legs <= 9;
}

async function checkOpenai(model) {
  const run = (what, work) => check("openai", model, what, work);
  const ask = (more) => client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, ...more });
  const response = (more) =>
    client.responses.create({ model, input: "Once upon a time", max_output_tokens: 8, temperature: 0, ...more });
  await run("chat", async () => (await ask({})).usage.completion_tokens > 0);
  await run("chat, streamed", async () => {
    let text = "";
    let usage;
    for await (const part of await ask({ stream: true, stream_options: { include_usage: true } })) {
      text += part.choices[0]?.delta?.content ?? "";
      usage = part.usage ?? usage;
    }
    const whole = await ask({});
    return text === (whole.choices[0].message.content ?? "") && usage.completion_tokens === whole.usage.completion_tokens;
  });
  await run("schema", async () => {
    const response_format = { type: "json_schema", json_schema: { name: "fox", schema, strict: true } };
    return legs((await ask({ max_tokens: 200, response_format })).choices[0].message.content);
  });
  await run("response, streamed", async () => {
    let text = "";
    for await (const event of await response({ stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return text === (await response({})).output_text;
  });
  await run("embeddings", async () => (await client.embeddings.create({ model, input: ["A fox", "A dog"] })).data.length === 2);
  await run("error: unknown model", () =>
    refused(() => ask({ model: "none" }), (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found"));
  await run("error: wrong value", () =>
    refused(() => ask({ temperature: 9 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature"));
  await run("error: too long, streamed", () =>
    refused(() => ask({ messages: tooLong, stream: true }), (e) => e.code === "context_length_exceeded"));
  const must = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200, reasoning_effort: "none" };
  const isCall = (completion) => {
    const [call, ...more] = completion.choices[0].message.tool_calls;
    return more.length === 0 && call.function.name === "look" && legs(call.function.arguments);
  };
  await run("tools", async () => isCall(await ask(must)));
  await run("tools, streamed", async () => {
    const stream = client.chat.completions.stream({ model, messages, temperature: 0, ...must });
    return isCall(await stream.finalChatCompletion());
  });
}

async function checkAnthropic(model) {
  const run = (what, work) => check("anthropic", model, what, work);
  const own = [{ name: "look", description: "Looks", input_schema: schema }];
  const ask = (more) => claude.messages.create({ model, max_tokens: 6, temperature: 0, messages, ...more });
  const text = (answer) => answer.content.map((block) => (block.type === "text" ? block.text : "")).join("");
  await run("message", async () => (await ask({ system: "Be short." })).usage.output_tokens > 0);
  await run("message, streamed", async () => {
    const stream = claude.messages.stream({ model, max_tokens: 6, temperature: 0, messages });
    let pieces = "";
    stream.on("text", (piece) => (pieces += piece));
    const whole = await stream.finalMessage();
    return pieces === text(whole) && pieces === text(await ask({}));
  });
  await run("count", async () => (await claude.messages.countTokens({ model, messages })).input_tokens > 0);
  await run("schema", async () =>
    legs(text(await ask({ max_tokens: 200, output_config: { format: { type: "json_schema", schema } } }))));
  await run("error: unknown model", () => refused(() => ask({ model: "none" }), (e) => e instanceof Anthropic.NotFoundError));
  await run("error: wrong value", () =>
    refused(() => ask({ temperature: 9 }), (e) => e instanceof Anthropic.BadRequestError && e.message.includes("temperature")));
  const must = { tools: own, tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 200 };
  const isCall = (answer) => {
    const [call, ...more] = answer.content.filter((block) => block.type === "tool_use");
    return more.length === 0 && answer.stop_reason === "tool_use" && call.name === "look" && legs(call.input);
  };
  await run("tools", async () => isCall(await ask(must)));
  await run("tools, streamed", async () => isCall(await claude.messages.stream({ model, messages, ...must }).finalMessage()));
}

async function checkOllama(model, hasTools) {
  const run = (what, work) => check("ollama", model, what, work);
  const ask = (more) => local.chat({ model, messages, options: { num_predict: 5, temperature: 0 }, ...more });
  await run("list", async () => (await local.list()).models.some((found) => found.model === `${model}:latest`));
  await run("show", async () => (await local.show({ model })).capabilities.includes("completion"));
  await run("chat, streamed", async () => {
    let text = "";
    for await (const part of await ask({ stream: true })) text += part.message.content;
    return text === (await ask({})).message.content;
  });
  await run("schema", async () =>
    legs((await ask({ format: schema, options: { num_predict: 200 }, ...(hasTools ? { think: false } : {}) })).message.content));
  await run("generate", async () => (await local.generate({ model, prompt: "Once", options: { num_predict: 5 } })).eval_count > 0);
  await run("embed", async () => (await local.embed({ model, input: ["A fox", "A dog"] })).embeddings.length === 2);
  await run("error: unknown model", () => refused(() => ask({ model: "none" }), (e) => e.status_code === 404));
  await run("error: wrong value", () => refused(() => ask({ options: { temperature: -1 } }), (e) => e.status_code === 400));
  if (model !== "caller") return;
  const isCall = ({ function: { name, arguments: given } }) => name === "look" && legs(given);
  await run("tools", async () => isCall((await ask({ tools, options: {} })).message.tool_calls[0]));
  await run("tools, streamed", async () => {
    const calls = [];
    for await (const part of await ask({ tools, options: {}, stream: true })) calls.push(...(part.message.tool_calls ?? []));
    return calls.length === 1 && isCall(calls[0]);
  });
}

// The package `ai`, once for each of its providers that speak to this server.
async function checkAi(model) {
  globalThis.AI_SDK_LOG_WARNINGS = false;
  const apiKey = "none";
  const baseURL = `${address}/v1`;
  // The provider of OpenAI sends no effort to models whose names it does not know.
  const withoutReasoning = (url, { body, ...init }) => {
    const more = url.endsWith("/responses") ? { reasoning: { effort: "none" } } : { reasoning_effort: "none" };
    return fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(body), ...more }) });
  };
  const compatible = createOpenAICompatible({ name: "forebay", apiKey, baseURL, includeUsage: true, supportsStructuredOutputs: true });
  const openai = createOpenAI({ apiKey, baseURL, fetch: withoutReasoning });
  const anthropic = createAnthropic({ apiKey, baseURL });
  const kinds = {
    compatible: compatible.chatModel,
    "openai, chat": openai.chat,
    "openai, responses": openai.responses,
    anthropic,
  };
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, reasoning_effort: "none" });
  const expected = answer.choices[0].message.content ?? "";
  for (const [kind, make] of Object.entries(kinds)) {
    const run = (what, work) => check("ai", model, `${kind}: ${what}`, work);
    const providerOptions = {
      forebay: { reasoningEffort: "none", parallel_tool_calls: false },
      openai: { parallelToolCalls: false },
      anthropic: { disableParallelToolUse: true },
    };
    const few = { model: make(model), messages, maxOutputTokens: 8, temperature: 0, maxRetries: 0, providerOptions };
    const more = { ...few, maxOutputTokens: 200 };
    await run("text", async () => {
      const { text, usage } = await generateText(few);
      return text === expected && usage.outputTokens === answer.usage.completion_tokens;
    });
    await run("streamed", async () => {
      const { fullStream, usage } = streamText(few);
      let text = "";
      for await (const part of fullStream) {
        if (part.type === "error") throw part.error;
        if (part.type === "text-delta") text += part.text;
      }
      return text === expected && (await usage).outputTokens === answer.usage.completion_tokens;
    });
    await run("schema", async () => legs((await generateObject({ ...more, schema: jsonSchema(schema) })).object));
    const execute = ({ legs }) => `an animal of ${legs} legs`;
    const look = { description: "Looks", inputSchema: jsonSchema(schema) };
    await run("tools, and their results", async () => {
      const tools = { look: tool({ ...look, execute }) };
      const { steps } = await generateText({ ...more, tools, toolChoice: "required", stopWhen: stepCountIs(2) });
      const results = steps.flatMap((step) => step.toolResults);
      if (results.length !== 2 || !(steps[1].usage.inputTokens > steps[0].usage.inputTokens)) return steps.map((step) => step.usage);
      return results.every(({ input, output }) => legs(input) && output === execute(input));
    });
    await run("tools, streamed", async () => {
      const { fullStream } = streamText({ ...more, tools: { look: tool(look) }, toolChoice: "required" });
      let pieces = "";
      const calls = [];
      for await (const part of fullStream) {
        if (part.type === "error") throw part.error;
        if (part.type === "tool-input-start") pieces = "";
        if (part.type === "tool-input-delta") pieces += part.delta;
        if (part.type === "tool-call") calls.push([part.toolName, part.input, JSON.parse(pieces)]);
      }
      return calls.length > 0 && calls.every(([name, input, read]) => name === "look" && legs(input) && input.legs === read.legs);
    });
    await run("error: unknown model", () =>
      refused(() => generateText({ ...few, model: make("none") }), (e) => APICallError.isInstance(e) && e.statusCode === 404));
    await run("error: too long", () =>
      refused(() => generateText({ ...few, messages: tooLong }), (e) => APICallError.isInstance(e) && e.statusCode === 400));
  }
  for (const [kind, make] of Object.entries({ compatible: compatible.embeddingModel, openai: createOpenAI({ apiKey, baseURL }).embedding })) {
    await check("ai", model, `${kind}: embeddings`, async () => {
      const values = ["A fox", "A dog and a cat"];
      const { embeddings } = await embedMany({ model: make(model), values, maxRetries: 0 });
      const { data } = await client.embeddings.create({ model, input: values });
      return data.every(({ embedding }, at) => embedding.every((value, i) => Math.abs(value - embeddings[at][i]) < 1e-6));
    });
  }
}

const models = (await client.models.list()).data.map((found) => found.id);
const clients = { openai: checkOpenai, anthropic: checkAnthropic, ollama: checkOllama, ai: checkAi };
for (const work of Object.values(clients)) {
  for (const model of models) await work(model, (await local.show({ model })).capabilities.includes("tools"));
}
console.log(`\n${"client".padEnd(18)}${models.map((model) => model.padEnd(26)).join("")}`);
let failed = 0;
for (const name of Object.keys(clients)) {
  const cells = models.map((model) => results.get(`${name} ${model}`));
  failed += cells.reduce((sum, [, more]) => sum + more, 0);
  console.log(name.padEnd(18) + cells.map(([good, bad]) => `${good} passed, ${bad} failed`.padEnd(26)).join(""));
}
if (!models.includes("caller")) console.log("NOT CHECKED: tools of ollama: there is no model caller");
console.log(failed ? `${failed} checks failed` : "all checks passed");
process.exit(failed ? 1 : 0);
