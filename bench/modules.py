#!/usr/bin/env python3
"""Times passes of a module whose weights are larger than the memory that they may take, with `forebay.torch.stream`.

    bench/modules.py [--blocks N] [--tokens N] [--vram SIZE ...] [--passes N]

The module has the widths of the transformer of Flux.1 (3072, with 12288 between), random weights in BF16, and N blocks of 0.26 GiB each.
Columns: seconds of a pass (the median), the same with all weights in VRAM, weights that a pass brings, their bytes over the bus, the rate of
the bus in this time, and the highest one that copies from pinned memory reach. Outputs must equal those of the resident module.
Needs PyTorch with CUDA, and a GPU with room for all weights. If `accelerate` is there, its offload to RAM is measured, too.
"""

import argparse
import statistics
import sys
import time

import forebay.torch
import torch
from gpu_rates import bus_rate
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=40)
parser.add_argument("--tokens", type=int, default=4608)
parser.add_argument("--vram", nargs="+", default=["3GiB", "6GiB"])
parser.add_argument("--passes", type=int, default=10)
arguments = parser.parse_args()
WIDTH, HEADS = 3072, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        make = lambda inner, outer: nn.Linear(inner, outer, dtype=torch.bfloat16, device="cuda")
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device="cuda")
        self.qkv, self.out = make(WIDTH, 3 * WIDTH), make(WIDTH, WIDTH)
        self.up, self.down = make(WIDTH, 4 * WIDTH), make(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (it.unflatten(-1, (HEADS, -1)).transpose(1, 2) for it in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def timed(module, x):
    """Return the median seconds of a pass, and the output."""
    times = []
    for _ in range(arguments.passes + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = module(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:]), result


torch.manual_seed(1)
with torch.inference_mode():
    x = torch.randn(1, arguments.tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
    module = nn.Sequential(*(Block() for _ in range(arguments.blocks))).eval()
    resident, expected = timed(module, x)
    module = module.cpu()
    torch.cuda.empty_cache()
    rate = bus_rate()
    print(f"resident: {resident:.3f} s; copies from pinned memory: {rate / 1e9:.1f} GB/s", flush=True)
    print("| vram | codec | seconds | resident, s | ratio | brought, GiB | over the bus, GiB | GB/s | of the bus | waited, s | seconds to code |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    wrong = 0
    for codec in ("auto", "none"):
        for vram in arguments.vram:
            began = time.perf_counter()
            stream = forebay.torch.stream(module, vram=vram, codec=codec)
            coding = time.perf_counter() - began
            timed(module, x)
            before = stream.statistics()
            seconds, result = timed(module, x)
            now = stream.statistics()
            wrong += not torch.equal(result, expected)
            passes = arguments.passes + 2
            brought = (now.loaded_bytes - before.loaded_bytes) / passes
            bus = brought * now.ram_bytes / now.weight_bytes
            print(f"| {vram} | {codec} | {seconds:.3f} | {resident:.3f} | {seconds / resident:.2f} | {brought / 2**30:.2f} | {bus / 2**30:.2f} |"
                  f" {bus / seconds / 1e9:.1f} | {bus / seconds / rate:.2f} | {(now.waited_seconds - before.waited_seconds) / passes:.3f} |"
                  f" {coding:.1f} |", flush=True)
            stream.close()
    try:
        import accelerate
    except ImportError:
        print("accelerate is not installed here")
    else:
        accelerate.cpu_offload(module, execution_device="cuda:0")
        seconds, result = timed(module, x)
        wrong += not torch.equal(result, expected)
        print(f"| | accelerate | {seconds:.3f} | {resident:.3f} | {seconds / resident:.2f} | | | | | | |")
print("outputs are equal" if not wrong else f"{wrong} OUTPUTS DIFFER")
sys.exit(bool(wrong))
