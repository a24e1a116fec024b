"""Loads a folder of safetensors files onto one GPU, and onto all GPUs with a part of the tensors for each, in turn.

    python3 gpus.py FOLDER [ROUNDS] [GPUS]

ROUNDS (6). GPUS: how many (all that torch sees). Each GPU has a process of its own, which loads its part with forebay.load. A rate
is all bytes over the seconds from the first process's start of its load to the last one's end. All loads are warm but one, which
counts what the processes read of the disk (0 on disks that do not count). Every second round runs in reverse order.

Prints a Markdown table. RAW names a file for every answer as a line of JSON. Needs torch and forebay.
"""

import json
import os
import socket
import statistics
import subprocess
import sys

import torch
from compare import PATIENCE, drop, fill, weights

HERE = os.path.dirname(os.path.abspath(__file__))


def load(folder, count, state):
    """Loads with a process for each GPU. What each printed."""
    workers = []
    for index in range(count):
        parent, child = socket.socketpair()
        parent.settimeout(PATIENCE)
        environment = {
            **os.environ, "READY": str(child.fileno()), "CUDA_VISIBLE_DEVICES": str(index), "SHARE": f"{index}/{count}",
        }
        command = [sys.executable, os.path.join(HERE, "load.py"), "forebay_share", state, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=[child.fileno()])
        child.close()
        workers.append((process, parent))
    try:
        for _, parent in workers:
            if not parent.recv(1):
                sys.exit("a process ended before its load")
        for _, parent in workers:
            parent.send(b"r")
        answers = []
        for process, _ in workers:
            output, _ = process.communicate(timeout=PATIENCE)
            if process.returncode != 0:
                sys.exit(f"a process ended with status {process.returncode}")
            answers.append(json.loads(output.splitlines()[-1]))
        return answers
    finally:
        for process, parent in workers:
            process.kill()
            parent.close()


def seconds(answers):
    return max(one["started"] + one["seconds"] for one in answers) - min(one["started"] for one in answers)


def main():
    folder = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    gpus = int(sys.argv[3]) if len(sys.argv) > 3 else torch.cuda.device_count()
    if not 2 <= gpus <= torch.cuda.device_count():
        sys.exit(f"this needs two GPUs; there are {torch.cuda.device_count()}")
    files = weights(folder)
    raw = open(os.environ["RAW"], "w") if "RAW" in os.environ else None

    drop(files)
    cold = load(folder, gpus, "cold")
    fill(files)
    rates = {1: [], gpus: []}
    tensors, size = set(), set()
    for number in range(rounds):
        for count in [1, gpus] if number % 2 == 0 else [gpus, 1]:
            answers = load(folder, count, "warm")
            total = sum(one["bytes"] for one in answers)
            tensors.add(sum(one["tensors"] for one in answers))
            size.add(total)
            rates[count].append(total / seconds(answers) / 1e9)
            each = ", ".join(f"{one['bytes'] / one['seconds'] / 1e9:.2f}" for one in answers)
            print(f"round {number + 1}, {count} GPUs: {rates[count][-1]:.2f} GB/s (each {each})", file=sys.stderr, flush=True)
            if raw:
                print(json.dumps({"gpus": count, "round": number + 1, "answers": answers}), file=raw, flush=True)
    if len(tensors) != 1 or len(size) != 1:
        sys.exit(f"not all loads had the same tensors: {tensors}, {size} bytes")

    print("| GPUs | GB/s, median (least to best) |\n| --- | --- |")
    for count, found in rates.items():
        print(f"| {count} | **{statistics.median(found):.2f}** ({min(found):.2f}-{max(found):.2f}) |")
    print(f"\n{gpus} GPUs have {statistics.median(rates[gpus]) / statistics.median(rates[1]):.2f} times the rate of one")
    read = sum(one["disk_bytes"] for one in cold)
    print(f"cold: {size.pop() / seconds(cold) / 1e9:.2f} GB/s, {read / sum(one['bytes'] for one in cold):.3f} bytes read for each byte")


main()
