#!/usr/bin/env python3
"""Measures a running server with several clients at once: tokens per second, time to the first token, gaps between tokens.

    bench/serve-load.py ADDRESS [--clients N] [--requests N] [--prompt WORDS] [--tokens N] [--form text|regex|schema] [--penalties]
                        [--from N] [--json]

Works with every server that has OpenAI's /v1/completions with streams. Each client sends its requests one after the other. `regex`
and `schema` ask for answers of a form with as many tokens. Only the standard library is needed. Prints one line.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--clients", type=int, default=1)
parser.add_argument("--requests", type=int, default=1, help="requests of each client")
parser.add_argument("--prompt", type=int, default=16, help="words of a prompt")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--form", choices=["text", "regex", "schema"], default="text")
parser.add_argument("--penalties", action="store_true", help="with penalties and a bias, which change logits")
parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first request; others have other prompts")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

host = urllib.parse.urlparse(arguments.address).netloc
SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 100 * arguments.tokens}},
          "required": ["text"], "additionalProperties": False}
firsts, gaps, counts, errors = [], [], [], []


def request(number):
    words = " ".join(f"word{(number * 31 + at * 7) % 9973}" for at in range(arguments.prompt))
    body = {"prompt": words, "max_tokens": arguments.tokens, "temperature": 1, "top_k": 40, "seed": number, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True}
    if arguments.penalties:
        body |= {"frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {"100": 2}}
    if arguments.form == "regex":
        body["structured_outputs"] = {"regex": f"[ -~]{{{100 * arguments.tokens}}}"}
    elif arguments.form == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "text", "schema": SCHEMA}}
    connection = http.client.HTTPConnection(host, timeout=600)
    started = last = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode()[:300])
    first, own_gaps, count = None, [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        part = json.loads(line[6:])
        if "error" in part:
            raise RuntimeError(str(part["error"])[:300])
        if part.get("usage"):
            count = part["usage"]["completion_tokens"]
        if not part.get("choices") or not part["choices"][0].get("text"):
            continue
        if first is None:
            first = now - started
        else:
            own_gaps.append(now - last)
        last = now
    connection.close()
    firsts.append(first or last - started)
    gaps.extend(own_gaps)
    counts.append(count)


def client(index):
    try:
        for turn in range(arguments.requests):
            request(arguments.first + turn * arguments.clients + index)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


started = time.perf_counter()
threads = [threading.Thread(target=client, args=(index,)) for index in range(arguments.clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.perf_counter() - started


def part(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


result = {
    "clients": arguments.clients, "form": arguments.form, "requests": len(counts), "errors": len(errors), "tokens": sum(counts),
    "seconds": seconds, "tokens_per_second": sum(counts) / seconds, "first_median": statistics.median(firsts) if firsts else 0.0,
    "first_p99": part(firsts, 0.99), "gap_median": part(gaps, 0.5), "gap_p99": part(gaps, 0.99),
}
if arguments.json:
    print(json.dumps(result))
else:
    print(f"{result['clients']} clients, {result['form']}: {result['tokens_per_second']:.1f} tokens/s ({result['tokens']} tokens), "
          f"first token {1e3 * result['first_median']:.0f} ms (p99 {1e3 * result['first_p99']:.0f}), gap {1e3 * result['gap_median']:.1f} ms "
          f"(p99 {1e3 * result['gap_p99']:.1f}), {result['errors']} errors")
for error in errors[:3]:
    print(error)
raise SystemExit(bool(errors))
