"""Processes with a process group of gloo, for tests of ranks that load together."""

import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def equal(one, other) -> int:
    """Return the number of parameters and buffers of two modules if all of them have the same bits."""
    import torch

    ones, others = one.state_dict(), other.state_dict()
    assert ones.keys() == others.keys()
    for name, tensor in ones.items():
        assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape), name
        flat = [it.contiguous().reshape(-1).view(torch.uint8) for it in (tensor, others[name])]
        assert torch.equal(*flat), name
    return len(ones)


def error_of(make) -> str | None:
    """Return the class and the words of the exception that a function raises."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_once(found: list[dict], name: str, sizes: dict, times: int = 1) -> list[list]:
    """Check that the ranks together read a checkpoint `times` times, and return what each rank read.

    `found` is what the ranks print, and `name` a case in it.
    """
    assert all(result[name]["equal"] > 10 for result in found)
    reads = [[(tensor, tuple(part)) for tensor, part, _ in result[name]["read"]] for result in found]
    total = sum(nbytes for result in found for *_, nbytes in result[name]["read"])
    assert total == times * sum(sizes.values())
    assert times > 1 or not set(reads[0]) & set(reads[1]), "each byte is read once"
    return reads


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def run_ranks(program: str, size: int, arguments: dict, timeout: float = 240) -> list[dict]:
    """Run a program of this folder as `size` ranks, and return the JSON object that each prints last.

    Each gets `arguments`, "rank", "size" and "port" as a JSON object.
    """
    port = free_port()
    processes = []
    for rank in range(size):
        given = json.dumps({**arguments, "rank": rank, "size": size, "port": port})
        processes.append(
            subprocess.Popen(
                [sys.executable, HERE / program, given],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        )
    results = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {rank}: {err[-6000:]}"
            results.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return results
