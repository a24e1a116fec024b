"""Processes with a process group of gloo, for tests of ranks that load together."""

import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


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
