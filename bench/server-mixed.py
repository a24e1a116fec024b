#!/usr/bin/env python3
"""Sends mixed traffic to a running `forebay serve`: random endpoints, lengths, temperatures, forms and cancels, from several clients.

    bench/server-mixed.py ADDRESS [--minutes M] [--clients N] [--pid PID] [--key KEY] [--model NAME] [--prompts N] [--seed N]

First it asks for every answer alone. Then N clients ask for them at random for M minutes, and for others, some of which they leave in
the middle. Every answer at temperature 0 or with a seed must be the one that came alone. With PID, the process of the server, it measures
resident memory, which must not grow after the first quarter. Needs no packages. Exit status 1 if an answer differs, a request fails, or
memory grows.
"""

import argparse
import collections
import http.client
import json
import os
import pathlib
import random
import resource
import threading
import time
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--minutes", type=float, default=10)
parser.add_argument("--clients", type=int, default=8)
parser.add_argument("--prompts", type=int, default=12)
parser.add_argument("--pid", type=int)
parser.add_argument("--key", default="none")
parser.add_argument("--model")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--longest", type=int, default=120, help="most tokens of an answer")
arguments = parser.parse_args()
HOST = urllib.parse.urlparse(arguments.address).netloc
WORDS = "the old king walked to sea and his small dog ran after a red fox while def return if list import rain on green hills".split()
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}, "red": {"type": "boolean"}},
          "required": ["legs", "red"], "additionalProperties": False}
GROWTH_MAX = 96 << 20
chance = random.Random(arguments.seed)
counts, failures, lock = collections.Counter(), [], threading.Lock()


def send(method, path, body=None):
    connection = http.client.HTTPConnection(HOST, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {arguments.key}"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return connection, connection.getresponse()


def get(path):
    connection, response = send("GET", path)
    try:
        return json.loads(response.read())
    finally:
        connection.close()


def words(count, random):
    return " ".join(random.choice(WORDS) for _ in range(count))


def text_of(path, body, data):
    """Returns the text of an answer, whole or in parts."""
    if path == "/v1/embeddings":
        return json.dumps(json.loads(data)["data"])
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in data.decode().splitlines()]
        parts = [json.loads(line) for line in lines if line.startswith("{")]
        if errors := [part for part in parts if part.get("error") and part["error"] is not None]:
            raise RuntimeError(str(errors[0])[:200])
    else:
        parts = [json.loads(data)]
    pieces = []
    for part in parts:
        if path == "/v1/completions":
            pieces += [choice["text"] for choice in part.get("choices", [])]
        elif path == "/v1/chat/completions":
            shown = [choice["delta"] if "delta" in choice else choice["message"] for choice in part["choices"]]
            pieces += [of.get("content") or "" for of in shown]
        elif path == "/v1/messages":
            pieces += [block.get("text", "") for block in part.get("content", [])] + [part.get("delta", {}).get("text", "")]
        elif path == "/v1/responses":
            if body.get("stream"):
                pieces += [part["delta"]] if part["type"] == "response.output_text.delta" else []
            else:
                pieces += [inner["text"] for item in part["output"] if item["type"] == "message" for inner in item["content"]]
        elif path == "/api/chat":
            pieces.append(part["message"]["content"])
        elif path == "/api/generate":
            pieces.append(part["response"])
    return "".join(pieces)


def requests(count, random):
    """Makes requests whose answers are always the same."""
    made = []
    for number in range(count):
        prompt, tokens = words(random.choice([1, 5, 30, 120]), random), random.choice([1, 4, 20, arguments.longest])
        messages = [{"role": "user", "content": prompt}]
        seeded = {"temperature": 0} if number % 3 else {"temperature": 1.1, "top_p": 0.9, "seed": number}
        form = random.choice([None, None, "schema", "regex"])
        rules = {"schema": {"guided_json": SCHEMA}, "regex": {"guided_regex": "([a-z]{1,9} ){3,20}end"}, None: {}}[form]
        made += [
            ("/v1/completions", {"prompt": prompt, "max_tokens": tokens, **seeded, **rules}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **seeded, **rules}),
            ("/v1/messages", {"messages": messages, "max_tokens": tokens, "temperature": 0}),
            ("/v1/responses", {"input": prompt, "max_output_tokens": tokens, "temperature": 0, "store": bool(number % 2)}),
            ("/api/chat", {"messages": messages, "options": {"num_predict": tokens, **seeded}, **({"format": SCHEMA} if form else {})}),
            ("/api/generate", {"prompt": prompt, "options": {"num_predict": tokens, "temperature": 0}}),
            ("/v1/embeddings", {"input": [prompt, words(3, random)]}),
        ]
    return [(path, {"model": model, **body}) for path, body in made]


def ask(path, body):
    connection, response = send("POST", path, body)
    try:
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {data[:200]!r}")
        return text_of(path, body, data)
    finally:
        connection.close()


def leave(path, body, random):
    """Asks for a stream and leaves at some moment: before the answer, at its beginning, or in the middle."""
    connection, response = http.client.HTTPConnection(HOST, timeout=600), None
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Authorization": f"Bearer {arguments.key}"})
        if random.random() < 0.7:
            response = connection.getresponse()
            for _ in range(random.choice([0, 1, 3, 10])):
                response.readline()
    finally:
        if response is not None:
            response.close()
        connection.close()


def client(number, until):
    random_own = random.Random(arguments.seed * 1000 + number)
    while time.monotonic() < until:
        path, body, expected = random_own.choice(known)
        kind = random_own.random()
        try:
            if kind < 0.15 and path != "/v1/embeddings":
                leave(path, body, random_own)
                done = "left"
            elif kind < 0.3:
                # Any answer will do; it is other load for those that are compared.
                ask("/v1/completions", {"model": model, "prompt": words(random_own.randrange(1, 200), random_own), "temperature": 1.5,
                                        "max_tokens": random_own.randrange(1, arguments.longest), "n": random_own.choice([1, 1, 3])})
                done = "any answer"
            else:
                streams = random_own.random() < 0.5 and path != "/v1/embeddings"
                answer = ask(path, {**body, "stream": streams} if path != "/v1/embeddings" else body)
                done = "compared, in parts" if streams else "compared"
                if answer != expected:
                    with lock:
                        failures.append(f"{path} {json.dumps(body)[:300]}: {answer[:200]!r} instead of {expected[:200]!r}")
            with lock:
                counts[done] += 1
        except Exception as error:
            with lock:
                failures.append(f"{path}: {type(error).__name__}: {error}")
        time.sleep(random_own.choice([0, 0, 0.05, 0.3]))


def resident():
    return int(pathlib.Path(f"/proc/{arguments.pid}/statm").read_text().split()[1]) * resource.getpagesize() if arguments.pid else 0


def descriptors():
    return len(os.listdir(f"/proc/{arguments.pid}/fd")) if arguments.pid else 0


def wait_until_idle():
    for _ in range(600):
        slots = get("/slots")
        if (slots["running"], slots["waiting"]) == (0, 0):
            return
        time.sleep(0.1)
    failures.append(f"after the traffic, requests run: {slots['running']}, {slots['waiting']}")


model = arguments.model or get("/v1/models")["data"][0]["id"]
known = [(path, body, ask(path, {**body, "stream": False} if path != "/v1/embeddings" else body))
         for path, body in requests(arguments.prompts, chance)]
print(f"{model}: {len(known)} answers alone, {sum(len(answer) for _, _, answer in known)} characters", flush=True)
before = descriptors()
began = time.monotonic()
until = began + 60 * arguments.minutes
threads = [threading.Thread(target=client, args=(number, until), daemon=True) for number in range(arguments.clients)]
for thread in threads:
    thread.start()
memory = []
while any(thread.is_alive() for thread in threads):
    time.sleep(min(5, 6 * arguments.minutes))
    memory.append((time.monotonic() - began, resident()))
for thread in threads:
    thread.join()
wait_until_idle()
time.sleep(2)
print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
if arguments.pid:
    quarter = max(size for at, size in memory if at <= 15 * arguments.minutes + 10)
    most, last = max(size for _, size in memory), resident()
    print(f"resident: {quarter / 2**20:.0f} MiB in the first quarter, {most / 2**20:.0f} MiB at most, {last / 2**20:.0f} MiB at the end; "
          f"descriptors: {before} before, {descriptors()} after")
    if last - quarter > GROWTH_MAX:
        failures.append(f"resident memory grew by {(last - quarter) / 2**20:.0f} MiB")
    if descriptors() > before:
        failures.append(f"{descriptors() - before} descriptors stay open")
if not any(name.startswith("compared") for name in counts):
    failures.append("no answer was compared")
for failure in failures[:10]:
    print("FAIL", failure)
print(f"{len(failures)} failed" if failures else "all the same as alone")
raise SystemExit(bool(failures))
