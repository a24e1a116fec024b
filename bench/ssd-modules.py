#!/usr/bin/env python3
"""Times passes of a module whose weights are on a disk, with less RAM than they need, beside the rate of the disk.

    bench/ssd-modules.py FOLDER [--gib N] [--ram SIZE] [--vram SIZE] [--device cuda:0|cpu] [--passes N] [--codec NAME]

Writes N GiB of BF16 weights to a safetensors file in FOLDER, unless it is there, in layers of 64 MiB, and streams them with `source`. The module
only touches its weights, so that a pass takes as long as they need to come. The limit is the rate of plain reads of the same file past the page cache,
with 64 threads and 512 KiB each, measured before and after. To limit RAM for real, run it in a control group.
Columns: seconds of a pass, bytes that it reads, bytes of weights that it brings, rate of the disk, and the share of it that the pass reaches.
"""

import argparse
import mmap
import os
import pathlib
import statistics
import sys
import threading
import time

import forebay.torch
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--gib", type=int, default=8)
parser.add_argument("--ram", default="1GiB")
parser.add_argument("--vram", default="512MiB")
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--passes", type=int, default=4)
parser.add_argument("--codec", default="auto", help="none: a CPU needs more time to decode than most disks to read")
arguments = parser.parse_args()
MIB = 1 << 20
ROWS, COLUMNS = 8192, 4096


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16))

    def forward(self, x):
        return x + self.weight[::1024, 0].float().sum()


def disk_rate(path):
    """Return the bytes per second of plain reads past the page cache, over three seconds."""
    piece = MIB // 2
    size, until, done = path.stat().st_size // piece, time.perf_counter() + 3, [0] * 64

    def read(number):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer, at = mmap.mmap(-1, piece), number
        while time.perf_counter() < until:
            done[number] += os.preadv(file, [buffer], at % size * piece)
            at += 64
        os.close(file)

    began = time.perf_counter()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(64)]
    [it.start() for it in threads]
    [it.join() for it in threads]
    return sum(done) / (time.perf_counter() - began)


arguments.folder.mkdir(parents=True, exist_ok=True)
path, count = arguments.folder / f"layers-{arguments.gib}.safetensors", arguments.gib * 16
torch.manual_seed(1)
if not path.exists():
    layer = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    # Rolled, so that layers differ.
    forebay.torch.save_file({f"{at}.weight": layer.roll(at, 0) for at in range(count)}, path)
    del layer
file = os.open(path, os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
with torch.device("meta"):
    module = nn.Sequential(*(Layer() for _ in range(count))).eval()
x = torch.zeros((), device=arguments.device)
with torch.inference_mode():
    rates = [disk_rate(path)]
    with forebay.torch.stream(module, arguments.device, arguments.vram, ram=arguments.ram, source=path, codec=arguments.codec) as stream:
        times, reads, loads = [], [], []
        for _ in range(arguments.passes + 2):
            before, began = stream.statistics(), time.perf_counter()
            result = float(module(x))
            times.append(time.perf_counter() - began)
            after = stream.statistics()
            reads.append(after.read_bytes - before.read_bytes)
            loads.append(after.loaded_bytes - before.loaded_bytes)
        plans = stream.plan()
    rates.append(disk_rate(path))
    expected = sum(float(tensor[::1024, 0].float().sum()) for _, tensor in forebay.iter_tensors(path, framework="pt"))
seconds, read, loaded = (statistics.median(of[2:]) for of in (times, reads, loads))
rate = statistics.mean(rates)
print(f"{path.stat().st_size / 1e9:.1f} GB of weights, ram {arguments.ram}, vram {arguments.vram} on {arguments.device}; first pass {times[0]:.2f} s")
print("| seconds | read, GB | brought, GB | disk, GB/s | share of the disk's rate |\n| --- | --- | --- | --- | --- |")
print(f"| {seconds:.3f} | {read / 1e9:.2f} | {loaded / 1e9:.2f} | {' and '.join(f'{it / 1e9:.2f}' for it in rates)} | {read / seconds / rate:.2f} |")
print(*plans)
is_right = abs(result - expected) <= 1e-3 * max(1.0, abs(expected))
print("the result is right" if is_right else f"WRONG RESULT: {result} instead of {expected}")
sys.exit(0 if is_right else 1)
