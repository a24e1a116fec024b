#!/usr/bin/env python3
"""Sends a running `forebay serve` the calls that Open WebUI's backend sends, and checks what it reads of the answers.

    bench/open-webui-check.py [ADDRESS] [--key KEY] [--model NAME]

The calls were recorded between Open WebUI 0.12.4 and forebay, with a connection of the kind Ollama and one of the kind OpenAI: method,
path, headers and fields. Needs no packages. Exit status 1 if a call failed.
"""

import argparse
import datetime
import http.client
import json
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--key", default="none")
parser.add_argument("--model")
arguments = parser.parse_args()
HOST = urllib.parse.urlparse(arguments.address).netloc
# What aiohttp sends. A connection of the kind Ollama has a key only if one was entered.
HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "Python/3.11 aiohttp/3.14.5",
           "Content-Type": "application/json", "Authorization": f"Bearer {arguments.key}"}
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": {
    "type": "object", "properties": {"legs": {"type": "integer"}}}}}]
failed = 0


def call(method, path, body=None):
    connection = http.client.HTTPConnection(HOST, timeout=120)
    connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.getheader("Content-Type") or "", data


def check(name, method, path, body, is_right):
    """Sends a call. `is_right` gets the status, the media type and the body, and returns true if the program can go on with them."""
    global failed
    try:
        status, kind, data = call(method, path, body)
        fine = is_right(status, kind, data) is True
        shown = "" if fine else f"{status} {kind} {data[:200]!r}"
    except Exception as error:
        fine, shown = False, f"{type(error).__name__}: {error}"
    failed += not fine
    print("pass" if fine else "FAIL", f"{name}: {method} {path}", shown, sep="  ")


def as_json(works):
    return lambda status, kind, data: status == 200 and kind.startswith("application/json") and bool(works(json.loads(data)))


def error(*statuses):
    """Returns a check of an error whose text is under `error`, which the program shows to its user."""
    return lambda status, kind, data: status in statuses and bool(json.loads(data)["error"])


def lines(status, kind, data):
    """Checks lines of JSON, of which the last one says that it is the last and counts tokens."""
    parts = [json.loads(line) for line in data.splitlines()]
    last = parts[-1]
    counted = all(isinstance(last[name], int) for name in ("total_duration", "load_duration", "prompt_eval_count", "eval_count"))
    return status == 200 and kind.startswith("application/x-ndjson") and last["done"] is True and counted and not any(
        part["done"] for part in parts[:-1])


def events(with_usage):
    def is_right(status, kind, data):
        texts = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
        parts = [json.loads(text) for text in texts[:-1]]
        usage = [part["usage"] for part in parts if part.get("usage")]
        return (status == 200 and kind.startswith("text/event-stream") and texts[-1] == "[DONE]" and bool(usage) == with_usage
                and parts[0]["choices"][0]["delta"]["role"] == "assistant")
    return is_right


def expires(model):
    return datetime.datetime.fromisoformat(model["expires_at"]) and model["model"]


listed = json.loads(call("GET", "/v1/models")[2])["data"]
model = arguments.model or listed[0]["id"]
tagged = model if ":" in model else model + ":latest"
few = {"temperature": 0, "num_predict": 8}
openai = {"model": model, "messages": MESSAGES, "max_tokens": 8}
task = {"model": model, "messages": MESSAGES, "stream": False, "max_tokens": 20, "metadata": {"task": "title_generation", "chat_id": "c"}}

# The list of models, and the check of a connection in the settings.
check("models of OpenAI", "GET", "/v1/models", None, as_json(lambda of: model in [found["id"] for found in of["data"]]))
check("models of Ollama", "GET", "/api/tags", None, as_json(lambda of: tagged in [found["model"] for found in of["models"]] and all(
    found["name"] and "details" in found and "size" in found and "digest" in found for found in of["models"])))
check("version", "GET", "/api/version", None, as_json(lambda of: [int(part) for part in of["version"].split(".")] >= [0, 1, 16]))
check("details", "POST", "/api/show", {"model": tagged}, as_json(lambda of: of["model_info"] and "completion" in of["capabilities"]))
# Chats by a connection of the kind OpenAI.
check("chat", "POST", "/v1/chat/completions", {**openai, "stream": False, "temperature": 0}, as_json(
    lambda of: of["choices"][0]["message"]["content"] is not None and of["usage"]["completion_tokens"]))
check("chat, streamed", "POST", "/v1/chat/completions", {**openai, "stream": True}, events(False))
check("chat, streamed, usage", "POST", "/v1/chat/completions", {**openai, "stream": True, "stream_options": {"include_usage": True}}, events(True))
check("chat with tools", "POST", "/v1/chat/completions", {**openai, "stream": False, "tools": TOOLS}, as_json(lambda of: of["choices"]))
check("title", "POST", "/v1/chat/completions", task, as_json(lambda of: of["choices"][0]["message"]["role"] == "assistant"))
check("embeddings", "POST", "/v1/embeddings", {"model": model, "input": ["A fox"]}, as_json(lambda of: of["data"][0]["embedding"]))
check("count of tokens", "POST", "/v1/messages/count_tokens", {**openai}, as_json(lambda of: of["input_tokens"] > 0))
check("unknown model", "POST", "/v1/chat/completions", {**openai, "model": "none"}, error(404))
# Chats by a connection of the kind Ollama.
chat = {"model": tagged, "messages": MESSAGES, "options": few}
check("chat", "POST", "/api/chat", {**chat, "stream": False}, as_json(lambda of: of["done"] and of["message"]["role"] == "assistant"))
check("chat, streamed", "POST", "/api/chat", {**chat, "stream": True}, lines)
check("chat with tools", "POST", "/api/chat", {**chat, "stream": True, "tools": TOOLS}, lines)
check("chat with an image", "POST", "/api/chat", {**chat, "messages": [{**MESSAGES[0], "images": ["aGVsbG8="]}]}, error(400))
check("generate", "POST", "/api/generate", {"model": tagged, "prompt": "A fox", "options": few, "stream": True}, lines)
check("embed", "POST", "/api/embed", {"model": tagged, "input": ["A fox", "A dog"], "truncate": True}, as_json(lambda of: len(of["embeddings"]) == 2))
check("embeddings", "POST", "/api/embeddings", {"model": tagged, "prompt": "A fox"}, as_json(lambda of: of["embedding"]))
check("loaded models", "GET", "/api/ps", None, as_json(lambda of: tagged in [expires(found) for found in of["models"]]))
check("chat by OpenAI's path", "POST", "/v1/chat/completions", {**openai, "model": tagged, "stream": True,
                                                              "stream_options": {"include_usage": True}}, events(True))
check("unload", "POST", "/api/generate", {"model": tagged, "prompt": "", "keep_alive": 0}, as_json(lambda of: of["done_reason"] == "unload"))
check("load", "POST", "/api/generate", {"model": tagged, "prompt": ""}, as_json(lambda of: of["done_reason"] == "load"))
# The manager of models. Without a library, the server says that it has none.
check("pull of Ollama's registry", "POST", "/api/pull", {"model": "llama3", "insecure": True}, error(404))
check("delete", "DELETE", "/api/delete", {"model": "none"}, error(404, 501))
check("copy", "POST", "/api/copy", {"source": "none", "destination": "other"}, error(404, 501))
check("create", "POST", "/api/create", {"model": "x", "from": tagged}, error(501))
print(f"{failed} calls failed" if failed else "all calls passed")
raise SystemExit(bool(failed))
