"""A rank of test_engines_gpu.py: loads to its GPU, alone or with others. It prints what it got and the VRAM it took."""

import json
import sys
import threading
import time

import torch
from forebay import _weights

given = json.loads(sys.argv[1])
device = f"cuda:{given['rank']}"
torch.cuda.set_device(device)
torch.zeros(1, device=device)
ranks = None
if given["size"] > 1:
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{given['port']}", rank=given["rank"], world_size=given["size"]
    )
    ranks = _weights.Ranks(torch.distributed.group.WORLD)
    # Memory of NCCL is not that of the load.
    ranks.gather(0)
    for source in range(given["size"]):
        for nbytes in (1, 1 << 16, 64 << 20):
            ranks.broadcast(torch.zeros(nbytes, dtype=torch.uint8, device=device), source)


def total(flat):
    """Sum bytes in pieces, because PyTorch makes numbers of 8 bytes of each before it adds them."""
    return sum(int(piece.sum(dtype=torch.int64)) for piece in flat.split(1 << 20))


# Nor is what the driver keeps after the first load, and for the kernels of the sums below.
for _ in _weights.read_weights(given["small"], device, budget=given["budget"]):
    pass
flat = torch.zeros(16 << 20, dtype=torch.uint8, device=device)
total(flat), total(flat[::7])
del flat
torch.cuda.synchronize()
torch.cuda.empty_cache()
before = torch.cuda.mem_get_info(device)[0]
used, unused, is_over = 0, 0, False


def watch():
    """Find the most memory in use, and the most that PyTorch keeps for what it allocates next."""
    global used, unused
    while not is_over:
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0]
        # Only numbers of one moment belong together.
        if (reserved, allocated) == (torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)):
            used = max(used, before - free - (reserved - allocated))
            unused = max(unused, reserved - allocated)
        time.sleep(0.0005)


thread = threading.Thread(target=watch)
thread.start()
sums, places = {}, {}
start = time.perf_counter()
for name, tensor in _weights.read_weights(given["files"], device, budget=given["budget"], ranks=ranks):
    # A sum that depends on the order of the bytes.
    flat = tensor.reshape(-1).view(torch.uint8)
    sums[name] = [total(flat), total(flat[::7])]
    places[name] = tensor.device.type
    del tensor, flat
torch.cuda.synchronize()
seconds = time.perf_counter() - start
is_over = True
thread.join()
if ranks is not None:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
print(json.dumps({"sums": sums, "places": places, "vram": used, "kept": unused, "seconds": seconds}))
