#!/usr/bin/env python3
"""Measures how long a server takes to answer when requests change between two models.

    bench/switch.py ADDRESS MODEL MODEL [--rounds N] [--prompt WORDS] [--json]

Start the server with memory for one of the models, such as `forebay serve a.gguf b.gguf --vram 20GiB`. Each round asks for one
token of the first model, again of the first model, then twice of the second one. So one of two requests finds its model loaded, and
the other one makes the server change it. The time is that from the request to the end of its answer of one token. The first round
is left out: it reads the files into the page cache, if RAM has room for them. Works with every server that has OpenAI's
/v1/completions and loads models on request. Only the standard library is needed.
"""

import argparse
import http.client
import json
import statistics
import sys
import time
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("models", nargs=2, metavar="MODEL")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--prompt", type=int, default=16, help="words of a prompt")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

address = urllib.parse.urlparse(arguments.address if "//" in arguments.address else "http://" + arguments.address)


def ask(method, path, body=None):
    connection = http.client.HTTPConnection(address.netloc, timeout=600)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def first_token(model, number):
    # Prompts differ, so that no keys and values are there already.
    words = " ".join(f"word{(number * 31 + at * 7) % 997}" for at in range(arguments.prompt))
    body = {"model": model, "prompt": words, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    status, text = ask("POST", "/v1/completions", body)
    seconds = time.perf_counter() - started
    if status != 200:
        sys.exit(f"{model}: status {status}: {text[:300]}")
    return seconds


def loaded():
    """Returns the loaded models by name, or nothing for a server that does not say it."""
    status, text = ask("GET", "/api/ps")
    if status != 200:
        return {}
    return {model["name"].removesuffix(":latest"): model for model in json.loads(text)["models"]}


times = {model: {"switched": [], "loaded": [], "load": []} for model in arguments.models}
sizes = {}
for number in range(arguments.rounds + 1):
    for model in arguments.models:
        switched = first_token(model, 2 * number)
        there = loaded()
        if len(there) > 1:
            sys.exit("the server has room for both models: give it a smaller --vram or --ram")
        again = first_token(model, 2 * number + 1)
        if number > 0:
            times[model]["switched"].append(switched)
            times[model]["loaded"].append(again)
            if model in there:
                sizes[model] = there[model]["size"]
                times[model]["load"].append(there[model]["load_seconds"])

if arguments.json:
    print(json.dumps({"times": times, "bytes": sizes}))
else:
    for model, of in times.items():
        switched = statistics.median(of["switched"])
        line = f"{model}: {switched:.3f} s to the first token with a switch (up to {max(of['switched']):.3f}), "
        line += f"{statistics.median(of['loaded']):.3f} s without"
        if model in sizes:
            line += f"; load {statistics.median(of['load']):.3f} s of it, {sizes[model] / 1e9:.2f} GB,"
            line += f" {sizes[model] / switched / 1e9:.2f} GB/s in all"
        print(line)
