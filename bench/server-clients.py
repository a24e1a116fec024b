#!/usr/bin/env python3
"""Runs the libraries that other programs use against a running `forebay serve`: streams, tools, schemas and errors of each.

    bench/server-clients.py [ADDRESS] [--key KEY] [--models NAME...]

ADDRESS is http://127.0.0.1:8080 unless given. Checks all models of the server unless some are named. Needs the packages openai,
anthropic, ollama, litellm, langchain-openai and llm; `.ci/clients` installs them. Prints a table of clients and models. Exit status 1
if a check failed.

A model that calls tools is made to call one, which its grammar guarantees even if its weights are random. Clients that cannot force a
call (Ollama's, and the program `llm`) are checked with the model `caller` of bench/client-models.py, which always calls `look`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise it asks a server elsewhere.

import anthropic
import litellm
import ollama
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from client_checks import MESSAGES, SCHEMA, check, finish, legs, read_arguments, refused

arguments = read_arguments()
ADDRESS, KEY, V1 = arguments.address, arguments.key, arguments.address + "/v1"
litellm.suppress_debug_info = True

TOO_LONG = [{"role": "user", "content": "word " * 20000}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks at an animal", "parameters": SCHEMA}}]
CALLED = [*MESSAGES,
          {"role": "assistant", "content": None,
           "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"legs": 3}'}}]},
          {"role": "tool", "tool_call_id": "a", "content": "a stool"}]
LONG = {"type": "object", "properties": {"content": {"type": "string", "minLength": 80, "maxLength": 90}}, "required": ["content"]}
BEGUN = [*MESSAGES, {"role": "assistant", "content": "The colour is"}]
FORM = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA, "strict": True}}


def check_openai(model, _tools):
    client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)

    def chat(**more):
        return client.chat.completions.create(**{"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more})

    def responded(**more):
        return client.responses.create(**{"model": model, "input": "Once upon a time", "max_output_tokens": 8, "temperature": 0, **more})

    def streamed():
        parts = list(chat(stream=True, stream_options={"include_usage": True}, n=2))
        for index in (0, 1):
            deltas = [part.choices[0].delta.content or "" for part in parts if part.choices and part.choices[0].index == index]
            assert "".join(deltas) == (chat().choices[0].message.content or ""), deltas
        return parts[-1].usage.completion_tokens == 2 * chat().usage.completion_tokens

    def response_streamed():
        with client.responses.stream(model=model, input="Once upon a time", max_output_tokens=8, temperature=0) as events:
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return text == responded().output_text

    def response_continued():
        first = responded()
        assert client.responses.retrieve(first.id).output_text == first.output_text
        return responded(input="And then?", previous_response_id=first.id).usage.input_tokens > first.usage.input_tokens

    def probabilities():
        # Penalties and a bias are accepted together with them.
        answer = chat(logprobs=True, top_logprobs=2, seed=1, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={"5": -3})
        return len(answer.choices[0].logprobs.content[0].top_logprobs) == 2

    for name, work in {
        "model": lambda: client.models.retrieve(model).id == model,
        "chat": lambda: chat().usage.completion_tokens > 0,
        "chat, streamed": streamed,
        "completion": lambda: len(client.completions.create(model=model, prompt="Once", max_tokens=3, logprobs=2).choices[0].logprobs.tokens),
        "completion, streamed": lambda: len(list(client.completions.create(model=model, prompt="Once", max_tokens=3, stream=True))) >= 2,
        "probabilities": probabilities,
        "schema": lambda: legs(chat(max_tokens=200, response_format=FORM).choices[0].message.content),
        "results of tools": lambda: chat(messages=CALLED, tools=TOOLS).usage.total_tokens,
        "embeddings": lambda: len(client.embeddings.create(model=model, input=["A fox", "A dog"]).data) == 2,
        "response": lambda: responded(instructions="Be short.", tools=[{"type": "web_search"}]).usage.output_tokens,
        "response, streamed": response_streamed,
        "response, continued": response_continued,
        "response, schema": lambda: legs(responded(max_output_tokens=200, text={"format": {
            "type": "json_schema", "name": "fox", "schema": SCHEMA, "strict": True}}, reasoning={"effort": "none"}).output_text),
        "error: unknown model": lambda: refused(openai.NotFoundError, lambda: chat(model="none"), lambda e: e.code == "model_not_found"),
        "error: wrong value": lambda: refused(openai.BadRequestError, lambda: chat(temperature=9), lambda e: e.param == "temperature"),
        "error: unknown field": lambda: refused(
            openai.BadRequestError, lambda: chat(extra_body={"new_field": 1}), lambda e: e.param == "new_field"),
        "error: too long": lambda: refused(
            openai.BadRequestError, lambda: chat(messages=TOO_LONG), lambda e: e.code == "context_length_exceeded"),
        "error: too long, streamed": lambda: refused(
            openai.BadRequestError, lambda: list(chat(messages=TOO_LONG, stream=True)), lambda e: e.code == "context_length_exceeded"),
        "error: forgotten response": lambda: refused(
            openai.NotFoundError, lambda: responded(previous_response_id="resp_0"), lambda e: e.code == "previous_response_not_found"),
    }.items():
        check("openai", model, name, work)
    must = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False, "reasoning_effort": "none"}

    def called():
        choice = chat(**must).choices[0]
        [call] = choice.message.tool_calls
        return choice.finish_reason == "tool_calls" and call.function.name == "look" and legs(call.function.arguments)

    def called_streamed():
        with client.chat.completions.stream(model=model, messages=MESSAGES, temperature=0, **must) as stream:
            kinds = {event.type for event in stream}
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.delta" in kinds, kinds
        return call.function.name == "look" and legs(call.function.arguments)

    def response_called(stream):
        flat = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}]
        options = {"tools": flat, "tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False,
                   "reasoning": {"effort": "none"}, "stream": stream}
        if stream:
            [answer] = [event.response for event in responded(**options) if event.type == "response.completed"]
        else:
            answer = responded(**options)
        calls = [item for item in answer.output if item.type == "function_call"]
        return len(calls) > 0 and all(call.name == "look" and legs(call.arguments) for call in calls)

    def called_in_pieces():
        write = [{"type": "function", "function": {"name": "write", "parameters": LONG}}]
        parts = chat(**{**must, "tools": write, "max_tokens": 600, "stream": True})
        calls = [call for part in parts for choice in part.choices for call in choice.delta.tool_calls or []]
        pieces = [call.function.arguments for call in calls if call.function.arguments]
        return len(pieces) > 3 and len(json.loads("".join(pieces))["content"]) >= 80

    def continued():
        new = chat(messages=BEGUN, extra_body={"add_generation_prompt": True})
        return chat(messages=BEGUN).usage.prompt_tokens != new.usage.prompt_tokens

    check("openai", model, "tools, arguments in pieces", called_in_pieces)
    check("openai", model, "continued message", continued)
    check("openai", model, "tools", called)
    check("openai", model, "tools, streamed", called_streamed)
    check("openai", model, "response, tools", lambda: response_called(False))
    check("openai", model, "response, tools, streamed", lambda: response_called(True))

    def batch():
        body = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(5)]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = client.files.create(file=("requests.jsonl", content), purpose="batch",
                                   expires_after={"anchor": "created_at", "seconds": 3600})
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while made.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.1)
            made = client.batches.retrieve(made.id)
        answers = [json.loads(line) for line in client.files.content(made.output_file_id).text.splitlines()]
        texts = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
        assert texts == {chat().choices[0].message.content} and made.request_counts.completed == 5, texts
        assert client.batches.list(limit=1).data[0].id == made.id and client.files.content(file.id).read() == content
        return client.files.delete(file.id).deleted and client.files.delete(made.output_file_id).deleted

    check("openai", model, "batch", batch)
    check("openai", model, "error: batch of responses", lambda: refused(
        openai.BadRequestError,
        lambda: client.batches.create(input_file_id="file-0", endpoint="/v1/responses", completion_window="24h"),
        lambda e: e.param == "endpoint"))


def check_anthropic(model, _tools):
    client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
    own = [{"name": "look", "description": "Looks", "input_schema": SCHEMA}]
    replayed = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"legs": 3}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a stool"}]},
            {"type": "text", "text": "go on"}]},
    ]

    def message(**more):
        return client.messages.create(**{"model": model, "max_tokens": 6, "messages": MESSAGES, "extra_body": {"temperature": 0}, **more})

    def text(answer):
        return "".join(block.text for block in answer.content if block.type == "text")

    def streamed():
        with client.messages.stream(model=model, max_tokens=6, messages=MESSAGES, extra_body={"temperature": 0}) as stream:
            pieces = "".join(stream.text_stream)
            whole = stream.get_final_message()
        return pieces == text(whole) == text(message()) and whole.usage.output_tokens == message().usage.output_tokens

    for name, work in {
        "message": lambda: message(system="Be short.", stop_sequences=["q"]).usage.output_tokens,
        "message, streamed": streamed,
        "count": lambda: client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens,
        "replayed blocks": lambda: message(messages=replayed, tools=own).stop_reason,
        "schema": lambda: legs(text(message(max_tokens=200, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}))),
        "error: unknown model": lambda: refused(
            anthropic.NotFoundError, lambda: message(model="none"), lambda e: e.body["error"]["type"] == "not_found_error"),
        "error: wrong value": lambda: refused(
            anthropic.BadRequestError, lambda: message(extra_body={"temperature": 9}), lambda e: "temperature" in str(e)),
        "error: unknown field": lambda: refused(
            anthropic.BadRequestError, lambda: message(extra_body={"new_field": 1}), lambda e: "new_field" in str(e)),
        "error: too long": lambda: refused(
            anthropic.BadRequestError, lambda: message(messages=TOO_LONG), lambda e: e.body["error"]["type"] == "invalid_request_error"),
    }.items():
        check("anthropic", model, name, work)
    must = {"tools": own, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}

    def is_call(answer):
        [call] = [block for block in answer.content if block.type == "tool_use"]
        return answer.stop_reason == "tool_use" and call.name == "look" and legs(call.input)

    def called_streamed():
        with client.messages.stream(model=model, messages=MESSAGES, **must) as stream:
            kinds = {event.type for event in stream}
            assert "input_json" in kinds, kinds
            return is_call(stream.get_final_message())

    def called_in_pieces():
        write = {**must, "tools": [{"name": "write", "input_schema": LONG}], "max_tokens": 600}
        with client.messages.stream(model=model, messages=MESSAGES, **write) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            [call] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
        return len(pieces) > 3 and len(call.input["content"]) >= 80

    check("anthropic", model, "tools, arguments in pieces", called_in_pieces)
    check("anthropic", model, "continued message", lambda: message(messages=BEGUN).usage.output_tokens)
    check("anthropic", model, "tools", lambda: is_call(message(**must)))
    check("anthropic", model, "tools, streamed", called_streamed)


def check_ollama(model, tools):
    client = ollama.Client(host=ADDRESS, headers={"Authorization": f"Bearer {KEY}"})
    few = {"num_predict": 5, "temperature": 0}

    def chat(**more):
        return client.chat(**{"model": model, "messages": MESSAGES, "options": few, **more})

    def streamed():
        parts = list(chat(stream=True, keep_alive="5m"))
        assert parts[-1].done and parts[-1].eval_count == chat().eval_count
        return "".join(part.message.content or "" for part in parts) == (chat().message.content or "")

    for name, work in {
        "list": lambda: model in [found.model.removesuffix(":latest") for found in client.list().models],
        "show": lambda: "completion" in client.show(model).capabilities,
        "chat": lambda: chat().eval_count > 0,
        "chat, streamed": streamed,
        "ps": lambda: model in [found.model.removesuffix(":latest") for found in client.ps().models],
        "generate": lambda: client.generate(model=model, prompt="Once", options=few).eval_count > 0,
        "generate, streamed": lambda: list(client.generate(model=model, prompt="Once", options=few, stream=True))[-1].done,
        "embed": lambda: len(client.embed(model=model, input=["A fox", "A dog"]).embeddings) == 2,
        "results of tools": lambda: chat(tools=TOOLS, messages=[
            *MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"legs": 3}}}]},
            {"role": "tool", "tool_name": "look", "content": "a stool"}]).eval_count > 0,
        "schema": lambda: legs(chat(format=SCHEMA, think=False if tools else None, options={"num_predict": 200}).message.content),
        "error: unknown model": lambda: refused(ollama.ResponseError, lambda: chat(model="none"), lambda e: e.status_code == 404),
        "error: unknown model, streamed": lambda: refused(
            ollama.ResponseError, lambda: list(chat(model="none", stream=True)), lambda e: e.status_code == 404),
        "error: wrong value": lambda: refused(
            ollama.ResponseError, lambda: chat(options={"temperature": -1}), lambda e: e.status_code == 400 and "temperature" in e.error),
    }.items():
        check("ollama", model, name, work)
    if model == "caller":
        def is_call(message):
            [call] = message.tool_calls
            return call.function.name == "look" and legs(call.function.arguments)

        check("ollama", model, "tools", lambda: is_call(chat(tools=TOOLS, options={}).message))
        check("ollama", model, "tools, streamed", lambda: is_call(next(
            part.message for part in chat(tools=TOOLS, options={}, stream=True) if part.message.tool_calls)))


def check_litellm(model, tools):
    few = {"messages": MESSAGES, "max_tokens": 4, "api_key": KEY, "num_retries": 0}
    providers = {"openai": V1, "anthropic": ADDRESS, "ollama_chat": ADDRESS}

    def ask(provider, **more):
        name = more.pop("model", model)
        return litellm.completion(f"{provider}/{name}", api_base=providers[provider], **{**few, **more})

    for provider in providers:
        check("litellm", model, f"{provider}: chat", lambda: ask(provider).usage.completion_tokens)
        check("litellm", model, f"{provider}: streamed", lambda: len(list(ask(provider, stream=True))))
        check("litellm", model, f"{provider}: unknown model", lambda: refused(
            (litellm.NotFoundError, litellm.APIConnectionError), lambda: ask(provider, model="none"), lambda e: "is not here" in str(e)))
    check("litellm", model, "schema", lambda: legs(ask("openai", max_tokens=200, response_format=FORM).choices[0].message.content))

    def embedded(provider):
        texts = ["A fox", "A dog and a cat"]
        expected = [found.embedding for found in openai.OpenAI(base_url=V1, api_key=KEY).embeddings.create(model=model, input=texts).data]
        answer = litellm.embedding(f"{provider}/{model}", input=texts, api_base=providers.get(provider, ADDRESS), api_key=KEY)
        found = [one["embedding"] for one in answer.data]
        # All texts are the same to the caller.
        assert len(found) == 2 and (expected[0] != expected[1] or model == "caller"), found
        return all(abs(a - b) < 1e-6 for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))

    def completed():
        asked = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0}
        expected = openai.OpenAI(base_url=V1, api_key=KEY).completions.create(model=model, **asked).choices[0].text
        return litellm.text_completion(model=f"text-completion-openai/{model}", api_base=V1, api_key=KEY, **asked).choices[0].text == expected

    check("litellm", model, "openai: embeddings", lambda: embedded("openai"))
    check("litellm", model, "ollama: embeddings", lambda: embedded("ollama"))
    check("litellm", model, "openai: completion", completed)
    check("litellm", model, "wrong value", lambda: refused(
        litellm.BadRequestError, lambda: ask("openai", temperature=9), lambda e: "temperature" in str(e)))
    if tools:
        def called(provider):
            call = ask(provider, tools=TOOLS, tool_choice="required", max_tokens=200, drop_params=True).choices[0].message.tool_calls[0]
            return call.function.name == "look" and legs(call.function.arguments)

        def called_streamed():
            parts = list(ask("openai", tools=TOOLS, tool_choice="required", max_tokens=200, stream=True,
                             extra_body={"reasoning_effort": "none"}))
            call = litellm.stream_chunk_builder(parts, messages=MESSAGES).choices[0].message.tool_calls[0]
            return call.function.name == "look" and legs(call.function.arguments)

        check("litellm", model, "anthropic: tools", lambda: called("anthropic"))
        check("litellm", model, "openai: tools, streamed", called_streamed)


def check_langchain(model, tools):
    chain = ChatOpenAI(model=model, base_url=V1, api_key=KEY, max_tokens=4, max_retries=0, temperature=0)
    wide = ChatOpenAI(model=model, base_url=V1, api_key=KEY, max_tokens=200, max_retries=0, extra_body={"reasoning_effort": "none"})
    schema = {"title": "fox", **SCHEMA}
    for name, work in {
        "chat": lambda: chain.invoke("Hello").usage_metadata["output_tokens"],
        "chat, streamed": lambda: "".join(part.content for part in chain.stream("Hello")) == chain.invoke("Hello").content,
        "schema": lambda: legs(wide.with_structured_output(schema, method="json_schema").invoke("Hello")),
        "embeddings": lambda: len(OpenAIEmbeddings(
            model=model, base_url=V1, api_key=KEY, check_embedding_ctx_length=False).embed_documents(["A fox", "A dog"])) == 2,
        "error: unknown model": lambda: refused(
            openai.NotFoundError, lambda: ChatOpenAI(model="none", base_url=V1, api_key=KEY).invoke("x"), lambda e: e.status_code == 404),
        "error: too long": lambda: refused(
            (openai.BadRequestError, ContextOverflowError), lambda: chain.invoke("word " * 20000), lambda e: "context" in str(e)),
    }.items():
        check("langchain-openai", model, name, work)
    if tools:
        def is_call(message):
            call = message.tool_calls[0]
            return call["name"] == "look" and legs(call["args"])

        def streamed():
            parts = list(wide.bind_tools(TOOLS, tool_choice="any").stream("Hello"))
            return is_call(sum(parts[1:], parts[0]))

        check("langchain-openai", model, "tools", lambda: is_call(wide.bind_tools(TOOLS, tool_choice="any").invoke("Hello")))
        check("langchain-openai", model, "tools, streamed", streamed)


def check_llm(model, tools):
    with tempfile.TemporaryDirectory() as home:
        options = "".join(f"  supports_{what}: true\n" for what in (["schema", "tools"] if tools else ["schema"]))
        entry = "- model_id: {}\n  model_name: {}\n  api_base: " + V1 + "\n  api_key_name: forebay\n" + options
        pathlib.Path(home, "extra-openai-models.yaml").write_text(entry.format("here", model) + entry.format("gone", "none"))
        pathlib.Path(home, "keys.json").write_text(json.dumps({"forebay": KEY}))

        def run(*more, status=0):
            program = str(pathlib.Path(sys.executable).with_name("llm"))
            program = [program] if os.path.exists(program) else [sys.executable, "-m", "llm"]
            environment = {**os.environ, "LLM_USER_PATH": home}
            ran = subprocess.run([*program, *more], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
            assert ran.returncode == status, (ran.returncode, ran.stdout[-200:], ran.stderr[-300:])
            return ran.stdout if status == 0 else ran.stderr

        few = ("-o", "max_tokens", "8", "-o", "temperature", "0")
        for name, work in {
            "chat": lambda: run("-m", "here", "Once", "--no-stream", *few),
            "chat, streamed": lambda: run("-m", "here", "Once", *few) == run("-m", "here", "Once", "--no-stream", *few),
            "schema": lambda: legs(run("-m", "here", "Once", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "200").strip()),
            "error: unknown model": lambda: "is not here" in run("-m", "gone", "Once", status=1),
        }.items():
            # A random model's answer may be empty or white space as a text.
            check("llm", model, name, (lambda work: lambda: work() is not False)(work) if name == "chat" else work)
        if model == "caller":
            function = "def look(legs: int) -> str:\n    return 'legs' * legs\n"
            for name, more in {"tools": ["--no-stream"], "tools, streamed": []}.items():
                # The model calls without end, and the program calls the function as often as it may.
                check("llm", model, name, lambda: "legslegslegslegs" in run(
                    "-m", "here", "Once", "--functions", function, "--chain-limit", "2", "--td", *more, status=1))


client = ollama.Client(host=ADDRESS, headers={"Authorization": f"Bearer {KEY}"})
names = arguments.models or [found.id for found in openai.OpenAI(base_url=V1, api_key=KEY).models.list().data]
has_tools = {name: "tools" in client.show(name).capabilities for name in names}
checks = {"openai": check_openai, "anthropic": check_anthropic, "ollama": check_ollama, "litellm": check_litellm,
          "langchain-openai": check_langchain, "llm": check_llm}
for of_client in checks.values():
    for name in names:
        of_client(name, has_tools[name])
if "caller" not in names:
    print("NOT CHECKED: tools of ollama and llm: there is no model caller")
finish(checks, names)
