#!/usr/bin/env python3
"""Runs the libraries that other programs use against a running `forebay serve`.

    bench/server-clients.py [ADDRESS]

ADDRESS is http://127.0.0.1:8080 unless given. Needs the packages openai, anthropic and ollama, and runs litellm and langchain-openai
if they are there. Prints one line for each check. Exit status 1 if one failed.
"""

import json
import sys
import time

import anthropic
import ollama
import openai

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
MESSAGES = [{"role": "user", "content": "Once upon a time there was"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA}}]
failed = []


def check(name, work):
    """Runs one check, which returns something to show, or false if it failed."""
    try:
        shown = work()
        fine = shown is not False and shown is not None
    except Exception as error:
        shown, fine = f"{type(error).__name__}: {str(error)[:300]}", False
    if not fine:
        failed.append(name)
    print("pass" if fine else "FAIL", name, shown, sep="  ")


def refused(error, work, value):
    """Returns what `value` says about the error that the work must end with."""
    try:
        work()
    except error as found:
        return value(found)
    return False


client = openai.OpenAI(base_url=ADDRESS + "/v1", api_key="none")
model = client.models.list().data[0].id


def chat(**options):
    return client.chat.completions.create(**{"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **options})


def chat_in_parts():
    parts = list(chat(stream=True, stream_options={"include_usage": True}, n=2))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices and part.choices[0].index == 0)
    return text == chat().choices[0].message.content and parts[-1].usage.completion_tokens == 16


HISTORY = MESSAGES + [
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
]
check("openai: chat", lambda: repr(chat().choices[0].message.content))
check("openai: chat in parts", chat_in_parts)
check("openai: tools", lambda: chat(tools=TOOLS, parallel_tool_calls=True, reasoning_effort="low").choices[0].finish_reason)
check("openai: results of tools", lambda: chat(messages=HISTORY, tools=TOOLS).usage.total_tokens)
check("openai: completion", lambda: client.completions.create(model=model, prompt="Once", max_tokens=3, logprobs=2).choices[0].logprobs.tokens)
check("openai: probabilities", lambda: chat(
    logprobs=True, top_logprobs=2, seed=1, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={"5": -3}, stop=["x"],
).choices[0].logprobs.content[0].top_logprobs[1].token)
STRICT = {"type": "object", "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["legs"],
          "additionalProperties": False}


def shaped():
    form = {"type": "json_schema", "json_schema": {"name": "fox", "schema": STRICT, "strict": True}}
    return json.loads(chat(max_tokens=60, response_format=form).choices[0].message.content)["legs"] <= 9


def responded(**options):
    return client.responses.create(**{"model": model, "input": "Once upon a time", "max_output_tokens": 8, "temperature": 0, **options})


def responded_in_parts():
    with client.responses.stream(model=model, input="Once upon a time", max_output_tokens=8, temperature=0) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return text == responded().output_text


def response_continued():
    first = responded()
    found = client.responses.retrieve(first.id).output_text == first.output_text
    return found and responded(input="And then?", previous_response_id=first.id).usage.input_tokens > first.usage.input_tokens


def response_of_form():
    form = {"format": {"type": "json_schema", "name": "fox", "schema": STRICT, "strict": True}}
    return json.loads(responded(max_output_tokens=60, text=form).output_text)["legs"] <= 9


def batch():
    body = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(5)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch",
                               expires_after={"anchor": "created_at", "seconds": 3600})
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
    listed = client.batches.list(limit=1).data[0].id == batch.id and client.files.content(file.id).read() == content
    gone = client.files.delete(file.id).deleted and client.files.delete(batch.output_file_id).deleted
    return listed and gone and texts == {chat().choices[0].message.content} and batch.request_counts.completed == 5


check("openai: batch", batch)
check("openai: batch of responses", lambda: refused(openai.BadRequestError, lambda: client.batches.create(
    input_file_id="file-0", endpoint="/v1/responses", completion_window="24h"), lambda error: error.param))
check("openai: JSON by a schema", shaped)
check("openai: response", lambda: repr(responded(instructions="Be short.", tools=[{"type": "web_search"}]).output_text))
check("openai: response in parts", responded_in_parts)
check("openai: response continued", response_continued)
check("openai: response by a schema", response_of_form)
check("openai: forgotten response", lambda: refused(
    openai.NotFoundError, lambda: responded(previous_response_id="resp_0"), lambda error: error.code))
check("openai: unknown model", lambda: refused(openai.NotFoundError, lambda: chat(model="none"), lambda error: error.code))
check("openai: wrong value", lambda: refused(openai.BadRequestError, lambda: chat(temperature=9), lambda error: error.param))

claude = anthropic.Anthropic(base_url=ADDRESS, api_key="none")


def message(**options):
    return claude.messages.create(**{"model": model, "max_tokens": 6, "messages": MESSAGES, **options})


def message_in_parts():
    with claude.messages.stream(
        model=model, max_tokens=6, messages=MESSAGES, tools=[{"name": "weather", "input_schema": SCHEMA}]
    ) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    return text == whole.content[0].text and whole.usage.output_tokens == 6 and whole.stop_reason


REPLAYED = [
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bern"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]},
        {"type": "text", "text": "go on"},
    ]},
]
check("anthropic: message", lambda: message(system="Be short.", stop_sequences=["q"]).content[0].text)
check("anthropic: message in parts", message_in_parts)
check("anthropic: count", lambda: claude.messages.count_tokens(model=model, messages=MESSAGES).input_tokens)
check("anthropic: replayed blocks", lambda: message(messages=REPLAYED, extra_body={"new_field": 1}).stop_reason)
check("anthropic: unknown model", lambda: refused(
    anthropic.NotFoundError, lambda: message(model="none"), lambda error: error.body["error"]["type"]))

local = ollama.Client(host=ADDRESS)
FEW = {"num_predict": 5, "temperature": 0}
check("ollama: list", lambda: local.list().models[0].model)
check("ollama: ps", lambda: local.ps().models[0].context_length)
check("ollama: show", lambda: local.show(model).capabilities)
check("ollama: chat", lambda: repr(local.chat(model=model, messages=MESSAGES, options=FEW).message.content))
check("ollama: chat in parts", lambda: "".join(
    part.message.content for part in local.chat(model=model, messages=MESSAGES, options=FEW, stream=True, keep_alive="5m")
) == local.chat(model=model, messages=MESSAGES, options=FEW).message.content)
check("ollama: JSON by a schema", lambda: json.loads(
    local.chat(model=model, messages=MESSAGES, format=STRICT, options={"num_predict": 60}).message.content)["legs"] <= 9)
check("ollama: generate", lambda: local.generate(model=model, prompt="Once", options=FEW).eval_count == 5)
check("ollama: unknown model", lambda: refused(
    ollama.ResponseError, lambda: local.chat(model="none", messages=MESSAGES), lambda error: error.status_code))

try:
    import litellm
except ImportError:
    print("skip  litellm")
else:
    few = {"messages": MESSAGES, "max_tokens": 4, "api_key": "none"}
    check("litellm: openai", lambda: litellm.completion(f"openai/{model}", api_base=ADDRESS + "/v1", **few).usage.completion_tokens == 4)
    check("litellm: anthropic, in parts", lambda: len(list(litellm.completion(f"anthropic/{model}", api_base=ADDRESS, stream=True, **few))))
    check("litellm: ollama", lambda: litellm.completion(f"ollama_chat/{model}", api_base=ADDRESS, **few).usage.completion_tokens == 4)

try:
    from langchain_openai import ChatOpenAI
except ImportError:
    print("skip  langchain-openai")
else:
    chain = ChatOpenAI(model=model, base_url=ADDRESS + "/v1", api_key="none", max_tokens=4)
    check("langchain: chat", lambda: repr(chain.invoke("Hello").content))
    check("langchain: chat in parts", lambda: len(list(chain.stream("Hello"))))
    check("langchain: tools", lambda: chain.bind_tools(TOOLS).invoke("Hello").response_metadata["finish_reason"])

print(f"{len(failed)} failed" if failed else "all passed")
sys.exit(1 if failed else 0)
