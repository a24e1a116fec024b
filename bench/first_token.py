#!/usr/bin/env python3
"""Process start to first token, alternating with llama.cpp.

  bench/first_token.py MODEL [--device cuda] [--rounds 5] [--cold] [--llama LLAMA_CLI]

FOREBAY names the program (target/release/forebay). --cold drops the page cache before every run (as root), otherwise the
file is read once before the first. With --llama, llama-cli runs the same prompt (all layers on the GPU, unless --device is
cpu). Prints seconds to the first byte of the answer and to the end, and the largest resident set. A driver compiles kernels
when a program first uses them and keeps them (~/.nv/ComputeCache): one run that does not count comes first.
"""
import argparse
import os
import statistics
import subprocess
import sys
import threading
import time

PROMPT = "a b c d e f g h i j k l m n o p"


def resident_kib(pid):
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


def run(command):
    """Seconds to the first byte and to the end, and the largest resident set in MiB."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    errors, peak = [], [0]

    def watch():
        while process.poll() is None:
            peak[0] = max(peak[0], resident_kib(process.pid))
            time.sleep(0.02)

    threads = [threading.Thread(target=watch), threading.Thread(target=lambda: errors.append(process.stderr.read()))]
    for thread in threads:
        thread.start()
    process.stdout.read(1)
    first = time.monotonic() - started
    process.stdout.read()
    status = process.wait()
    end = time.monotonic() - started
    for thread in threads:
        thread.join()
    if status != 0:
        sys.exit(f"{command[0]} ended with status {status}:\n{errors[0].decode(errors='replace')[-2000:]}")
    return first, end, peak[0] / 1024


def drop_caches():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as caches:
        caches.write("3")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--llama")
    arguments = parser.parse_args()
    forebay = os.environ.get("FOREBAY", "target/release/forebay")
    common = ["--temperature", "0"]
    programs = {
        "forebay": [forebay, "run", arguments.model, "--device", arguments.device, "--raw", "--prompt", PROMPT,
                    "--max-tokens", "1", *common],
    }
    if arguments.llama:
        layers = "0" if arguments.device == "cpu" else "999"
        programs["llama.cpp"] = [arguments.llama, "-m", arguments.model, "-ngl", layers, "-p", PROMPT, "-n", "1",
                                 "-no-cnv", "--no-display-prompt", "--no-warmup", "--temp", "0"]
    for command in programs.values():
        run(command)
    found = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, command in programs.items():
            if arguments.cold:
                drop_caches()
            found[name].append(run(command))
    how = "cold" if arguments.cold else "warm"
    print(f"{'program':<10} {'first token, s (least to most)':>32} {'end, s':>8} {'resident MiB':>13}  {how}")
    for name, runs in found.items():
        first, end, peak = zip(*runs)
        spread = f"{statistics.median(first):.2f} ({min(first):.2f} to {max(first):.2f})"
        print(f"{name:<10} {spread:>32} {statistics.median(end):>8.2f} {max(peak):>13.0f}")


if __name__ == "__main__":
    main()
