"""Rates of a GPU that benchmarks of modules compare with: bench/modules.py and bench/image-modules.py."""

import time

import torch


def bus_rate():
    """Return the bytes per second of copies from pinned memory."""
    host, device = torch.empty(1 << 30, dtype=torch.uint8).pin_memory(), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.numel() / (time.perf_counter() - began))
    return best
