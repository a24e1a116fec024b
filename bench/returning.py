#!/usr/bin/env python3
"""Measures how soon conversations that return get their first token: forebay against llama-server.

    bench/returning.py FOREBAY LLAMA_SERVER MODEL [--conversations N] [--tokens N] [--rounds N] [--forebay=OPTION]... [--llama=OPTION]...

One request runs at a time, and the device's KV cache has room for one conversation. So each conversation that returns was moved away
for the others: by forebay to RAM (--kv-ram), by llama-server to RAM (--cache-ram). Then both servers are stopped and started again.
forebay finds its blocks in --kv-disk. llama-server restores the files that were saved with /slots (--slot-save-path), one for each
conversation, which the client must name. Times are from the request to the end of its answer of one token; for llama-server after the
start, with the request that restores the slot.

LLAMA_SERVER may be -: forebay is then measured alone. Rounds alternate between the programs, with the same conversations of random
tokens. Prints a Markdown table.
Needs serving.py beside it. An option that begins with a dash is given as --llama=-t --llama=2.
"""

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from serving import ask, server

parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("llama_server")
parser.add_argument("model")
parser.add_argument("--conversations", type=int, default=5)
parser.add_argument("--tokens", type=int, default=1000, help="tokens of a conversation")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--forebay", dest="forebay_options", action="append", default=[])
parser.add_argument("--llama", dest="llama_options", action="append", default=[])
arguments = parser.parse_args()

context = arguments.tokens + 64
generator = random.Random(1)
conversations = [[generator.randrange(10, 1000) for _ in range(arguments.tokens)] for _ in range(arguments.conversations)]
# What a user adds when the conversation returns.
added = [generator.randrange(10, 1000) for _ in range(16)]


def first_token(port, prompt, before=None):
    started = time.perf_counter()
    if before:
        before()
    ask(port, "/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - started


def forebay(folder):
    return [arguments.forebay, "serve", arguments.model, "--name", "model", "--parallel", "1", "--ctx", str(context), "--kv-ram",
            "4GiB", "--kv-disk", f"{folder}/kv", *arguments.forebay_options]


def llama(folder):
    return [arguments.llama_server, "-m", arguments.model, "-np", "1", "-c", str(context), "--cache-ram", "4096", "--slot-save-path",
            folder, *arguments.llama_options]


def measure(command, is_llama):
    times = {"new": [], "returns": [], "after a restart": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        slot = lambda action, index: ask(port, f"/slots/0?action={action}", {"filename": f"{index}.bin"})
        with server(command(folder)) as port:
            # The first request of a server takes longer.
            first_token(port, added)
            for index, prompt in enumerate(conversations):
                times["new"].append(first_token(port, prompt))
                if is_llama:
                    slot("save", index)
            for prompt in conversations:
                times["returns"].append(first_token(port, prompt + added))
        with server(command(folder)) as port:
            first_token(port, added)
            for index, prompt in enumerate(conversations):
                before = (lambda index=index: slot("restore", index)) if is_llama else None
                times["after a restart"].append(first_token(port, prompt + added, before))
        used = int(subprocess.run(["du", "-sb", folder], capture_output=True, text=True).stdout.split()[0])
    return {name: statistics.median(of) for name, of in times.items()}, used


programs = [("forebay", arguments.forebay, forebay, False)]
if arguments.llama_server != "-":
    programs.append(("llama-server", arguments.llama_server, llama, True))
for _, program, _, _ in programs:
    if not shutil.which(program):
        sys.exit(f"{program}: is no program")
runs = {name: [] for name, _, _, _ in programs}
for number in range(arguments.rounds):
    for name, _, command, is_llama in programs if number % 2 == 0 else reversed(programs):
        print(f"round {number + 1}: {name}", file=sys.stderr)
        runs[name].append(measure(command, is_llama))
print(f"{arguments.conversations} conversations of {arguments.tokens} tokens, median of the conversations, each round\n")
show = lambda values: ", ".join(f"{value:.3f}" for value in values)
times_sooner = lambda of, than: ", ".join(f"{b / a:.2f}" for a, b in zip(of, than))
rows = ("new", "returns", "after a restart")
of = {name: {row: [run[row] for run, _ in runs[name]] for row in rows} for name in runs}
used = {name: f"{runs[name][0][1] / 1e6:.0f}" for name in runs}
if len(programs) == 1:
    print("| first token, s | forebay | times sooner than new |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row} | {show(of['forebay'][row])} | {times_sooner(of['forebay'][row], of['forebay']['new'])} |")
    print(f"| MB on disk | {used['forebay']} | |")
else:
    print("| first token, s | forebay | llama-server | times sooner |\n| --- | --- | --- | --- |")
    for row in rows:
        ours, theirs = of["forebay"][row], of["llama-server"][row]
        print(f"| {row} | {show(ours)} | {show(theirs)} | {times_sooner(ours, theirs)} |")
    print(f"| MB on disk | {used['forebay']} | {used['llama-server']} | |")
