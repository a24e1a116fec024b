#!/usr/bin/env python3
"""Measures a server with more conversations than its KV cache has room for, against one that has room for all.

    bench/conversations.py FOREBAY MODEL [--conversations N] [--fitting N] [--tokens N] [--turns N] [--answer N] [--at-once N]
                           [--rounds N] [--option=OPTION]...

Each conversation begins with a prompt of --tokens tokens of its own, and every turn adds 32 tokens and gets an answer of --answer tokens.
All conversations take their first turn, then all take the second, and so on. The KV cache of the device (--kv-tokens) has room for
--fitting conversations in one server and for all in the other; --kv-ram has room for all. The first turn is not measured. Counts the tokens of
later turns that were read again, beyond the answer before and less than two blocks at its ends. Rounds alternate. Prints a Markdown table.
Needs serving.py beside it.
"""

import argparse
import concurrent.futures
import random
import statistics
import sys
import time

from serving import ask, server

parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("model")
parser.add_argument("--conversations", type=int, default=50)
parser.add_argument("--fitting", type=int, default=10)
parser.add_argument("--tokens", type=int, default=4000)
parser.add_argument("--turns", type=int, default=3)
parser.add_argument("--answer", type=int, default=64)
parser.add_argument("--at-once", type=int, default=4, help="requests at a time")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--option", action="append", default=[], help="option of forebay serve; --option=--vram --option=8GiB")
arguments = parser.parse_args()

ADDED = 32
context = arguments.tokens + arguments.turns * (ADDED + arguments.answer) + 32


def command(fitting):
    return [arguments.forebay, "serve", arguments.model, "--name", "model", "--parallel", str(arguments.at_once), "--ctx", str(context),
            "--kv-tokens", str(fitting * context), "--kv-ram", "64GiB", *arguments.option]


def turn_of(port, prompt):
    body = {"model": "model", "prompt": prompt, "max_tokens": arguments.answer, "temperature": 0, "ignore_eos": True,
            "include_statistics": True}
    answer = ask(port, "/v1/completions", body)
    return answer["usage"], answer["statistics"][0]


def measure(fitting):
    generator = random.Random(1)
    words = lambda count: [generator.randrange(10, 1000) for _ in range(count)]
    prompts = [words(arguments.tokens) for _ in range(arguments.conversations)]
    times, again, generated, from_ram = [], 0, 0, 0
    with server(command(fitting)) as port, concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        for turn in range(arguments.turns):
            started = time.perf_counter()
            answers = list(pool.map(lambda prompt: turn_of(port, prompt), prompts))
            if turn > 0:
                times.append(time.perf_counter() - started)
                for (usage, of), prompt in zip(answers, prompts):
                    # What is new: words in the place of the answer, and those that the user adds.
                    known = len(prompt) - arguments.answer - ADDED
                    again += max(0, known - 32 - of["cached_tokens"])
                    generated += usage["completion_tokens"]
                    from_ram += of["cached_tokens_from_ram"]
            # An answer's tokens are not known exactly, so the conversation goes on with others in their place.
            for prompt in prompts:
                prompt.extend(words(arguments.answer + ADDED))
    each = arguments.conversations * arguments.answer
    print(f"turns with room for {fitting}: {', '.join(f'{each / time:.1f}' for time in times)} tokens/s", file=sys.stderr)
    return generated / sum(times), again, from_ram


rates = {arguments.fitting: [], arguments.conversations: []}
last = {}
for number in range(arguments.rounds):
    for fitting in list(rates) if number % 2 == 0 else reversed(list(rates)):
        rate, again, from_ram = measure(fitting)
        print(f"round {number + 1}, room for {fitting}: {rate:.1f} tokens/s", file=sys.stderr)
        rates[fitting].append(rate)
        last[fitting] = (again, from_ram)
print(f"{arguments.conversations} conversations of {arguments.tokens} tokens, {arguments.turns - 1} later turns\n")
print("| room for | tokens/s of later turns | read again | from RAM |\n| --- | --- | --- | --- |")
for fitting, values in rates.items():
    again, from_ram = last[fitting]
    print(f"| {fitting} | {', '.join(f'{value:.1f}' for value in values)} | {again} | {from_ram} |")
ratios = [few / all_ for few, all_ in zip(rates[arguments.fitting], rates[arguments.conversations])]
print(f"\nroom for some / room for all: **{statistics.median(ratios):.3f}** ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
