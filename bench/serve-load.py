#!/usr/bin/env python3
"""Measures a running server with several clients at once: tokens per second, time to the first token, gaps between tokens.

    bench/serve-load.py ADDRESS [--clients N] [--requests N] [--prompt WORDS] [--tokens N] [--form text|regex|schema] [--penalties]
                        [--from N] [--metrics] [--json]

Works with every server that has OpenAI's /v1/completions with streams. Each client sends its requests one after the other. `regex`
and `schema` ask for answers of a form with as many tokens. --metrics is for forebay: it also gives the rates from the moment when every
client has a first token until the first answer ends, so that no prompts are read in that time. Only the standard library is needed.
Prints one line.
"""

import argparse
import http.client
import json
import re
import statistics
import threading
import time
import urllib.parse
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--clients", type=int, default=1)
parser.add_argument("--requests", type=int, default=1, help="requests of each client")
parser.add_argument("--prompt", type=int, default=16, help="words of a prompt")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--form", choices=["text", "regex", "schema"], default="text")
parser.add_argument("--penalties", action="store_true", help="with penalties and a bias, which change logits")
parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first request; others have other prompts")
parser.add_argument("--metrics", action="store_true", help="rates while all clients generate, with bytes of weights from /metrics")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

host = urllib.parse.urlparse(arguments.address).netloc
SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 100 * arguments.tokens}},
          "required": ["text"], "additionalProperties": False}
firsts, gaps, counts, errors = [], [], [], []
begun, parts, samples, ended = 0, 0, [], threading.Event()


def request(number):
    global begun, parts
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
        parts += 1
        if first is None:
            first = now - started
            begun += 1
        else:
            own_gaps.append(now - last)
        last = now
    connection.close()
    ended.set()
    firsts.append(first or last - started)
    gaps.extend(own_gaps)
    counts.append(count)


def client(index):
    try:
        for turn in range(arguments.requests):
            request(arguments.first + turn * arguments.clients + index)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


def sample():
    """Reads the metrics while all clients generate their first answers."""
    while not ended.is_set():
        if begun == arguments.clients:
            text = urllib.request.urlopen(f"{arguments.address}/metrics", timeout=60).read().decode()
            read = lambda name: sum(float(value) for value in re.findall(rf"^forebay_{name}.* (\S+)$", text, re.MULTILINE))
            samples.append({"seconds": time.perf_counter(), "parts": parts, "pcie_bytes": read('weights_bytes_total.*tier="pcie"'),
                            "passes": read("generate_passes"), "prompt_passes": read("prompt_passes")})
        ended.wait(0.25)


started = time.perf_counter()
sampler = threading.Thread(target=sample)
if arguments.metrics:
    sampler.start()
threads = [threading.Thread(target=client, args=(index,)) for index in range(arguments.clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.perf_counter() - started
ended.set()
if arguments.metrics:
    sampler.join()


def part(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


result = {
    "clients": arguments.clients, "form": arguments.form, "requests": len(counts), "errors": len(errors), "tokens": sum(counts),
    "seconds": seconds, "tokens_per_second": sum(counts) / seconds, "first_median": statistics.median(firsts) if firsts else 0.0,
    "first_p99": part(firsts, 0.99), "gap_median": part(gaps, 0.5), "gap_p99": part(gaps, 0.99),
}
if arguments.metrics and len(samples) >= 2:
    whole = {key: samples[-1][key] - samples[0][key] for key in samples[0]}
    result["all_generate"] = {"seconds": whole["seconds"], "passes": whole["passes"], "prompt_passes": whole["prompt_passes"],
                              "texts_per_second": whole["parts"] / whole["seconds"],
                              "pcie_bytes_per_second": whole["pcie_bytes"] / whole["seconds"]}
if arguments.json:
    print(json.dumps(result))
else:
    print(f"{result['clients']} clients, {result['form']}: {result['tokens_per_second']:.1f} tokens/s ({result['tokens']} tokens), "
          f"first token {1e3 * result['first_median']:.0f} ms (p99 {1e3 * result['first_p99']:.0f}), gap {1e3 * result['gap_median']:.1f} ms "
          f"(p99 {1e3 * result['gap_p99']:.1f}), {result['errors']} errors")
    if "all_generate" in result:
        rates = result["all_generate"]
        print(f"while all generate ({rates['seconds']:.1f} s, {rates['passes']:.0f} passes, {rates['prompt_passes']:.0f} with prompts): "
              f"{rates['texts_per_second']:.1f} texts/s, {rates['pcie_bytes_per_second'] / 1e9:.1f} GB/s of weights over PCIe")
for error in errors[:3]:
    print(error)
raise SystemExit(bool(errors))
