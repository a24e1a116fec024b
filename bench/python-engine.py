#!/usr/bin/env python3
"""Compares `forebay.Engine` in Python with the same batch in Rust, `forebay batch`.

    bench/python-engine.py FOREBAY MODEL [--requests 64] [--tokens 128] [--parallel 8] [--rounds 5] [--threads N]

FOREBAY is the program. Each round runs, one after the other and each in a process of its own: `forebay batch`,
`Engine.batch`, and as many asyncio streams as requests, which take every token as a part. All get the same requests, and
the answers must be equal. A time is that of the whole process with the load of the model, so that all contain the same.
The overhead is the median of
 the rounds' ratios. Exit status 1 if answers differ.
"""

import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

WORDS = "king queen river forest fox door night letter captain garden winter horse island lamp mother tower".split()
WAYS = ("batch", "streams")


def requests(count: int, tokens: int) -> list[dict]:
    prompts = [f"The {WORDS[n % 16]} and the {WORDS[(7 * n + n // 16 + 3) % 16]}" for n in range(count)]
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    return [
        {"prompt": prompt, "max_tokens": tokens, "seed": number, **sampling}
        for number, prompt in enumerate(prompts)
    ]


def in_python(way: str, arguments: argparse.Namespace) -> None:
    """Answer the requests and write the texts to standard output."""
    import forebay

    wanted = requests(arguments.requests, arguments.tokens)
    options = {"context": arguments.context, "parallel": arguments.parallel, "threads": arguments.threads}
    # The batch in Rust has no limit for the time between two tokens either.
    engine = forebay.Engine(arguments.model, device="cpu", max_latency=1000.0, **options)
    if way == "batch":
        texts = [answer.text for answer in engine.batch(wanted)]
    else:

        async def one(request: dict) -> str:
            return "".join([part.text async for part in engine.astream(request.pop("prompt"), **request)])

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(one(request) for request in wanted))

        texts = asyncio.run(all_of_them())
    engine.close()
    json.dump(texts, sys.stdout)


def in_rust(arguments: argparse.Namespace, folder: pathlib.Path) -> tuple[float, list[str]]:
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(requests(arguments.requests, arguments.tokens))
    ]
    (folder / "in.jsonl").write_text("\n".join(lines))
    command = [arguments.forebay, "batch", arguments.model, folder / "in.jsonl", "-o", folder / "out.jsonl"]
    command += ["--device", "cpu", "--ctx", str(arguments.context), "--parallel", str(arguments.parallel), "--force"]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    started = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return seconds, [answer["response"]["body"]["choices"][0]["text"] for answer in answers]


def of_python(way: str) -> tuple[float, list[str]]:
    started = time.perf_counter()
    ran = subprocess.run([sys.executable, *sys.argv, "--as", way], check=True, capture_output=True)
    return time.perf_counter() - started, json.loads(ran.stdout)


parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("model")
parser.add_argument("--requests", type=int, default=64)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--parallel", type=int, default=8)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--as", dest="way", choices=WAYS, help=argparse.SUPPRESS)
arguments = parser.parse_args()
if arguments.way:
    in_python(arguments.way, arguments)
    sys.exit()

times: dict[str, list[float]] = {"rust": [], "batch": [], "streams": []}
with tempfile.TemporaryDirectory() as folder:
    for number in range(arguments.rounds):
        # The order changes, so that none always comes first.
        order = list(times)[number % 3 :] + list(times)[: number % 3]
        found = {}
        for way in order:
            seconds, found[way] = in_rust(arguments, pathlib.Path(folder)) if way == "rust" else of_python(way)
            times[way].append(seconds)
        if not found["rust"] == found["batch"] == found["streams"]:
            sys.exit("the answers differ")
        print(f"round {number + 1}: " + ", ".join(f"{way} {times[way][-1]:.2f} s" for way in times), flush=True)
print("\n| | median s | range s | against Rust, median of the rounds |\n| --- | --- | --- | --- |")
for way, of in times.items():
    # Machines change their speed from round to round, so a time is compared with that of the same round.
    ratio = statistics.median(mine / rust for mine, rust in zip(of, times["rust"]))
    print(f"| {way} | {statistics.median(of):.2f} | {min(of):.2f}-{max(of):.2f} | {100 * (ratio - 1):+.1f} % |")
