#!/usr/bin/env python3
"""Measures what keys and values on disk cost while weights are streamed from the same disk.

    bench/kv-beside-weights.py FOREBAY MODEL [--requests N] [--tokens N] [--answer N] [--ram SIZE] [--rounds N] [--option=OPTION]...

`forebay batch` answers requests whose prompts have nothing in common, with little RAM for weights, and two at a time. The KV cache has room
for two of them and RAM for keys and values has 32 MiB, so the blocks of every prompt are written to the disk: with --kv-disk, and without
(--kv-ram 0). Times are of the whole command, with the writes at its end. The page cache is dropped before each run, so this needs root. The answers
must be equal. Prints a Markdown table. Only the standard library is needed.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("model")
parser.add_argument("--requests", type=int, default=6)
parser.add_argument("--tokens", type=int, default=1100, help="tokens of a prompt; blocks of shorter ones than 1,024 may not be written")
parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
parser.add_argument("--ram", default="2GiB")
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--option", action="append", default=[], help="option of forebay batch; --option=--device --option=cpu")
arguments = parser.parse_args()
if os.geteuid() != 0:
    sys.exit("this needs root: it drops the page cache")

generator = random.Random(5)
context = arguments.tokens + arguments.answer + 16
forebay, model = (os.path.abspath(path) for path in (arguments.forebay, arguments.model))


def run(folder, on_disk):
    kv = os.path.join(folder, "kv")
    shutil.rmtree(kv, ignore_errors=True)
    output = os.path.join(folder, "out.jsonl")
    subprocess.run(["sync"], check=True)
    with open("/proc/sys/vm/drop_caches", "w") as drop:
        drop.write("3")
    more = ["--kv-ram", "32MiB", "--kv-disk", kv] if on_disk else ["--kv-ram", "0"]
    command = [forebay, "batch", model, os.path.join(folder, "in.jsonl"), "-o", output, "--force", "--ram", arguments.ram, "--parallel",
               "2", "--kv-tokens", str(2 * context), "--ctx", str(context), *more, *arguments.option]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(done.stderr)
    written = sum(entry.stat().st_size for entry in os.scandir(kv)) if on_disk else 0
    with open(output) as lines:
        answers = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]
    return seconds, written, answers


with tempfile.TemporaryDirectory(dir=".") as folder:
    with open(os.path.join(folder, "in.jsonl"), "w") as lines:
        for number in range(arguments.requests):
            prompt = [generator.randrange(10, 1000) for _ in range(arguments.tokens)]
            body = {"model": "model", "prompt": prompt, "max_tokens": arguments.answer, "temperature": 0}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.write(json.dumps(line) + "\n")
    times = {False: [], True: []}
    expected = written = None
    for number in range(arguments.rounds):
        for on_disk in (False, True) if number % 2 == 0 else (True, False):
            seconds, bytes_written, answers = run(folder, on_disk)
            times[on_disk].append(seconds)
            written = bytes_written or written
            if expected not in (None, answers):
                sys.exit("the answers differ")
            expected = answers
ratios = [without / beside for without, beside in zip(times[False], times[True])]
show = lambda values: ", ".join(f"{value:.1f}" for value in values)
print("| without, s | with --kv-disk, s | MB written | tokens/s with / without |\n| --- | --- | --- | --- |")
print(f"| {show(times[False])} | {show(times[True])} | {(written or 0) / 1e6:.0f} | **{statistics.median(ratios):.3f}** "
      f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}) |")
