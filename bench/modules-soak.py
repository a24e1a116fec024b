#!/usr/bin/env python3
"""Runs passes of one streamed module from many threads, with failures at random places, and checks results, memory and threads.

    bench/modules-soak.py [--passes N] [--threads N] [--vram SIZE] [--layers N] [--width N] [--device cuda:0|cpu] [--seed N]

Each thread runs its share of the passes, with another batch, branch and order of layers each time. One pass in eight fails in a layer that is
chosen at random. Every result must equal that of the module without streaming, to the bit. VRAM is that of the driver (NVML) without what
PyTorch has reserved, over what was in use before. It may not exceed `vram`, the stage, and 8 MiB for what the driver rounds up. After `close` the
same VRAM, threads and open files must be left as before. Exit status 1 if anything is wrong.
"""

import argparse
import ctypes
import gc
import os
import pathlib
import random
import sys
import threading
import time

import forebay.torch
import torch
from forebay._load import bytes_of
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--passes", type=int, default=1000)
parser.add_argument("--threads", type=int, default=20)
parser.add_argument("--vram", default="768MiB")
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()
MIB = 1 << 20
device = torch.device(arguments.device)
BATCHES = (1, 7, 32)


class Failed(Exception):
    pass


class Layers(nn.Module):
    """Layers of which a pass uses two thirds: those of its branch, and a first one that comes again at the end."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, branch, fails_at=None):
        order = [at for at in range(len(self.layers)) if at % 3 != branch]
        if branch == 2:
            order.reverse()
        for place, at in enumerate([*order, order[0]]):
            if place == fails_at:
                raise Failed
            x = x + torch.tanh(self.layers[at](self.norm(x)))
        return x


def used_vram():
    """Return the bytes of VRAM in use without those that PyTorch has reserved, or None if there is no GPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_reserved(device)
    memory = (ctypes.c_ulonglong * 3)()
    if nvml.nvmlDeviceGetMemoryInfo(handle, memory):
        raise RuntimeError("NVML does not tell how much VRAM is in use")
    return memory[2] - max(before, torch.cuda.memory_reserved(device))


def of_process():
    """Return the threads, the open files and the RAM of this process in bytes."""
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(status["Threads"]), len(os.listdir("/proc/self/fd")), int(status["VmRSS"].split()[0]) * 1024


if device.type == "cuda":
    nvml, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(device.index or 0, ctypes.byref(handle)):
        sys.exit("modules-soak.py: NVML cannot be used")

torch.manual_seed(arguments.seed)
dtype = torch.bfloat16
with torch.inference_mode():
    torch.set_default_dtype(dtype)
    module = Layers(arguments.width, arguments.layers).eval()
    torch.set_default_dtype(torch.float32)
    weights = sum(it.numel() * it.element_size() for it in module.parameters())
    inputs = [torch.randn(batch, arguments.width, dtype=dtype, device=device) for batch in BATCHES]
    module.to(device)
    expected = {(place, branch): module(x, branch) for place, x in enumerate(inputs) for branch in range(3)}
    # Each thread of PyTorch that multiplies takes VRAM for good.
    together = threading.Barrier(arguments.threads)

    def multiplies():
        together.wait()
        with torch.inference_mode():
            module(inputs[0], 0)
        together.wait()

    own = [threading.Thread(target=multiplies) for _ in range(arguments.threads)]
    [it.start() for it in own]
    [it.join() for it in own]
    del own
    module.to("cpu")
    # What the driver and forebay need once for a process is in use before the count begins.
    small = nn.Sequential(*(nn.Linear(2048, 2048, dtype=dtype) for _ in range(4))).eval()
    with forebay.torch.stream(small, device, "24MiB"):
        for _ in range(3):
            small(torch.zeros(1, 2048, dtype=dtype, device=device))
    del small
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

first_used, (first_threads, first_files, _) = used_vram(), of_process()
wrong, failed, most_used, middle_ram = [], [], first_used, None
done, lock, ended = 0, threading.Lock(), threading.Event()


def watch():
    global most_used
    while not ended.wait(0.005):
        most_used = max(most_used, used_vram())


def passes(number):
    global done, middle_ram
    chance = random.Random(arguments.seed * 1000 + number)
    for _ in range(arguments.passes // arguments.threads):
        place, branch = chance.randrange(len(inputs)), chance.randrange(3)
        fails_at = chance.randrange(arguments.layers * 2 // 3) if chance.random() < 1 / 8 else None
        try:
            with torch.inference_mode():
                result = module(inputs[place], branch, fails_at)
                right = fails_at is None and torch.equal(result, expected[place, branch])
        except Failed:
            right = fails_at is not None
            failed.append(number)
        except Exception as error:  # noqa: BLE001
            right = False
            print(f"{type(error).__name__}: {error}", flush=True)
        with lock:
            done += 1
            if done == arguments.passes // 2:
                middle_ram = of_process()[2]
        if not right:
            wrong.append((number, place, branch, fails_at))


began = time.perf_counter()
stream = forebay.torch.stream(module, device, arguments.vram)
prepared = time.perf_counter() - began
watcher = threading.Thread(target=watch)
if first_used is not None:
    watcher.start()
began = time.perf_counter()
threads = [threading.Thread(target=passes, args=(number,)) for number in range(arguments.threads)]
[it.start() for it in threads]
[it.join() for it in threads]
seconds = time.perf_counter() - began
ended.set()
if first_used is not None:
    watcher.join()
counts, last_ram = stream.statistics(), of_process()[2]
stream.close()
del threads
gc.collect()
problems = [f"{len(wrong)} passes were wrong: {wrong[:5]}"] if wrong else []
print(f"{weights / MIB:.0f} MiB of weights, vram {arguments.vram}; {done} passes of {arguments.threads} threads in {seconds:.1f} s, {len(failed)} failed as told")
print(f"{counts.loaded_bytes / 1e9:.1f} GB brought; RAM of the process {middle_ram / MIB:.0f} MiB in the middle, {last_ram / MIB:.0f} MiB at the end")
if last_ram > middle_ram + 64 * MIB:
    problems.append("RAM grows")
if first_used is not None:
    budget, used, left = bytes_of(arguments.vram), most_used - first_used, used_vram() - first_used
    stage = counts.device_bytes - budget
    print(f"VRAM by NVML: at most {used / MIB:.0f} MiB more than before ({budget / MIB:.0f} for weights, {stage / MIB:.0f} of stage), {left / MIB:.0f} MiB at the end")
    if used > budget + stage + 8 * MIB:
        problems.append("VRAM exceeds its budget")
    if left > 8 * MIB:
        problems.append("VRAM is left in use")
last_threads, last_files, _ = of_process()
if last_threads > first_threads or last_files > first_files:
    problems.append(f"{last_threads - first_threads} threads and {last_files - first_files} files are left")
print("all results are equal, and nothing is left" if not problems else "; ".join(problems).upper())
sys.exit(bool(problems))
