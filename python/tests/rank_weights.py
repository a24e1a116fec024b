"""A rank of test_weights.py: loads with others and prints what it got and read."""

import hashlib
import json
import sys

import torch
from forebay import Error, _weights

given = json.loads(sys.argv[1])
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{given['port']}", rank=given["rank"], world_size=given["size"]
)
rank = given["rank"]
read = []
open_stream = _weights.open_stream


class Failing:
    """A stream that fails after some tensors."""

    def __init__(self, inner, count):
        self.inner, self.count = inner, count

    def __next__(self):
        self.count -= 1
        if self.count < 0:
            raise OSError("the disk is gone")
        return next(self.inner)

    def close(self):
        self.inner.close()


def recorded(table, parts, device, budget):
    read.extend((entry.name, list(part or ()), _weights.part_bytes(entry, part)) for entry, part in parts)
    stream = open_stream(table, parts, device, budget)
    return Failing(stream, given["failing_after"]) if rank == given.get("failing_rank") else stream


_weights.open_stream = recorded
wanted = given.get("wanted", [None] * given["size"])[rank]
got = []
result = {}
try:
    for name, tensor in _weights.read_weights(
        given["files"] if isinstance(given["files"], list) else given["files"][str(rank)],
        "cpu",
        budget=given["budgets"][rank] if "budgets" in given else given["budget"],
        ranks=_weights.Ranks(torch.distributed.group.WORLD),
        choose=None if wanted is None else lambda names: [name in wanted for name in names],
    ):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        got.append((name, str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()))
except (Error, OSError) as error:
    result = {"error": f"{type(error).__name__}: {error}"}
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print(json.dumps({"got": got, "read": read, **result}))
