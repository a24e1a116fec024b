#!/usr/bin/env python3
"""Measures the perplexity of texts with each type of KV cache.

    bench/kv-perplexity.py FOREBAY MODEL TEXT... [--types f16,q8_0,q4_0] [--tokens N] [--device DEVICE]

FOREBAY is the program, TEXT files of plain text, of which the first N tokens are read (default: 1000). Prints one line for
each type: the number of tokens, their perplexity, and its distance from the first type's.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import urllib.request


def measured(args, kind, texts):
    """Returns the number of predicted tokens and their perplexity."""
    log = tempfile.TemporaryFile("w+")
    command = [args.program, "serve", args.model, "--name", "model", "--port", "0", "--device", args.device, "--kv-type", kind, "--parallel", "1"]
    with subprocess.Popen(command, stderr=log) as server:
        try:
            while True:
                log.seek(0)
                found = re.search(r"answers at (http://[^ ,]+)", log.read())
                if found:
                    break
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(f"kv-perplexity.py: the server does not start: {log.read()}")
                time.sleep(0.05)

            def ask(path, body):
                request = urllib.request.Request(found[1] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=3600) as answer:
                    return json.load(answer)

            total = count = 0
            for text in texts:
                ids = ask("/tokenize", {"model": "model", "content": text})["tokens"][: args.tokens]
                # One position is for the token that is generated.
                body = {"model": "model", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 0}
                logprobs = ask("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
                total -= sum(logprobs)
                count += len(logprobs)
            return count, math.exp(total / count)
        finally:
            server.terminate()


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    texts = []
    for path in args.texts:
        with open(path, encoding="utf-8") as file:
            texts.append(file.read())
    first = None
    for kind in args.types.split(","):
        count, perplexity = measured(args, kind, texts)
        first = first or perplexity
        print(f"{kind:5}  {count} tokens  perplexity {perplexity:.4f}  {100 * (perplexity / first - 1):+.2f} %")


if __name__ == "__main__":
    main()
