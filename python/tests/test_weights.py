"""Weights for engines: right tensors for every budget, each byte read once by all ranks, errors on all ranks."""

import hashlib
import os
import random
import subprocess
import sys

import forebay
import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch", reason="WEIGHTS FOR ENGINES NOT CHECKED: torch is not installed here")

from forebay import _weights  # noqa: E402

SHAPES = [(3,), (64, 64), (300, 1000), (1, 700, 900), (2, 300_000), (), (0, 4), (8, 128, 128), (700_000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Files whose numbers are not in the order of their names, and their tensors."""
    import forebay.torch

    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(1)
    files, tensors = [], {}
    for number in range(1, 12):
        inside = {}
        for at, shape in enumerate(SHAPES):
            dtype = DTYPES[(number + at) % len(DTYPES)]
            inside[f"f{number}.t{at}"] = (torch.randn(shape, generator=generator) * 50).to(dtype)
        files.append(str(folder / f"model-{number}.safetensors"))
        forebay.torch.save_file(inside, files[-1])
        tensors |= inside
    return files, tensors


def facts(tensors):
    return {
        name: (
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


def got_by_name(result):
    got = {name: tuple(rest) for name, *rest in result["got"]}
    assert len(got) == len(result["got"]), "a tensor came twice"
    return got


@pytest.mark.parametrize("budget", ["1MiB", "3MiB", "8MiB", "64MiB", "1GiB"])
def test_alone(checkpoint, budget):
    files, tensors = checkpoint
    order, numbers = [], []
    for name, tensor in _weights.read_weights(files[::-1], "cpu", budget=budget):
        wanted = tensors[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name
        order.append(name)
        numbers.append(int(name[1:].partition(".")[0]))
    assert sorted(order) == sorted(tensors)
    assert numbers == sorted(numbers), "files come by their numbers"


@pytest.mark.parametrize(("size", "budget"), [(2, "24MiB"), (3, "200MiB")])
def test_ranks_read_each_byte_once(checkpoint, size, budget):
    files, tensors = checkpoint
    results = run_ranks("rank_weights.py", size, {"files": files, "budget": budget})
    wanted = facts(tensors)
    for result in results:
        assert got_by_name(result) == wanted
    reads = [(name, tuple(part)) for result in results for name, part, _ in result["read"]]
    assert len(reads) == len(set(reads)), "nothing is read twice"
    total = sum(tensor.nbytes for tensor in tensors.values())
    loads = [sum(nbytes for *_, nbytes in result["read"]) for result in results]
    assert sum(loads) == total
    assert max(loads) <= 1.25 * total / size, "the ranks read equal shares"


def test_ranks_that_want_different_tensors(checkpoint):
    files, tensors = checkpoint
    names = sorted(tensors)
    wanted = [
        [name for at, name in enumerate(names) if at % 4 in (0, 1)],
        [name for at, name in enumerate(names) if at % 4 in (0, 2)],
    ]
    results = run_ranks("rank_weights.py", 2, {"files": files, "budget": "32MiB", "wanted": wanted})
    everything = facts(tensors)
    for result, mine in zip(results, wanted, strict=True):
        assert got_by_name(result) == {name: everything[name] for name in mine}
    for at, name in enumerate(names):
        readers = [rank for rank, result in enumerate(results) if any(it[0] == name for it in result["read"])]
        if at % 4 == 3:
            assert readers == [], "nobody wants it"
        elif at % 4 != 0:
            assert readers == [at % 4 - 1], "who wants it alone reads it"
        elif tensors[name].nbytes < 1 << 20:
            assert len(readers) == 1


def test_errors_reach_all_ranks(checkpoint, tmp_path):
    files, _ = checkpoint
    failing = {"files": files, "budget": "24MiB", "failing_rank": 1, "failing_after": 3}
    found = [result["error"] for result in run_ranks("rank_weights.py", 2, failing)]
    assert "rank 1 of 2 could not read tensor" in found[0] and found[0].startswith("ReadError")
    assert found[1] == "OSError: the disk is gone"
    missing = {"files": {"0": files, "1": [str(tmp_path / "none.safetensors")]}, "budget": "24MiB"}
    found = [result["error"] for result in run_ranks("rank_weights.py", 2, missing)]
    assert "rank 1 of 2 cannot load" in found[0] and "none.safetensors" in found[0]
    assert found[1].startswith("FileNotFoundError")
    different = {"files": {"0": files, "1": files[1:]}, "budget": "24MiB"}
    found = [result["error"] for result in run_ranks("rank_weights.py", 2, different)]
    assert all("see different tensors" in it for it in found)


def test_budgets_of_ranks_must_be_equal(checkpoint):
    files, _ = checkpoint
    results = run_ranks("rank_weights.py", 2, {"files": files, "budgets": ["24MiB", "32MiB"]})
    assert all("budget" in result["error"] and result["error"].startswith("OptionError") for result in results)


def test_division_of_the_budget():
    generator = random.Random(3)
    for _ in range(2000):
        budget = generator.randrange(1 << 20, 4 << 30)
        sizes = [int(budget * generator.random() ** generator.choice([1, 4, 20]) * 1.5) for _ in range(6)]
        for is_shared in (False, True):
            memory = _weights.divide(budget, sizes, is_shared)
            entries = [_weights.Entry("t", "U8", (size,), (size,), size) for size in sizes]
            largest = max(
                (size for size in sizes if size <= memory.largest and (is_shared or size > memory.part)), default=0
            )
            packs = 2 * min(4 << 20, budget // 16) if is_shared else 0
            arriving = memory.stream // 2 if is_shared else 0
            assert memory.stream + memory.stream // 2 + arriving + 2 * largest + packs <= budget
            assert memory.part > 0
            for entry in entries:
                parts = _weights.parts_of(entry, memory.part)
                assert all(_weights.part_bytes(entry, part) <= memory.part for part in parts)
                assert sum(_weights.part_bytes(entry, part) for part in parts) == entry.nbytes
                assert memory.part // 2 < entry.nbytes / max(len(parts), 1) or len(parts) == 1


def test_large_rows():
    entry = _weights.Entry("t", "U8", (1, 4, 1000), (1, 4, 1000), 4000)
    assert _weights.parts_of(entry, 2500) == [(1, 0, 2), (1, 2, 4)]
    assert _weights.parts_of(entry, 4000) == [None]
    assert _weights.parts_of(entry, 999) == []


def test_memory_is_bounded(tmp_path):
    import forebay.torch

    files = []
    for number in range(6):
        files.append(str(tmp_path / f"{number}.safetensors"))
        shapes = {f"{number}.{at}": (rows, 1024) for at, rows in enumerate([4096, 4096, 9, 2048, 64, 6000])}
        forebay.torch.save_file({name: torch.ones(shape) for name, shape in shapes.items()}, files[-1])
    program = """
import re, sys, torch
from forebay import _weights
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
def now(): return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
dict(_weights.read_weights(sys.argv[2:3], "cpu", budget="1MiB"))
open("/proc/self/clear_refs", "w").write("5")
before, total = now(), 0
for name, tensor in _weights.read_weights(sys.argv[2:], "cpu", budget=sys.argv[1]):
    total += tensor.nbytes
assert total > 380 << 20, total
print(peak() - before)
"""
    # Without it, glibc keeps freed memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    command = [sys.executable, "-c", program, "64MiB", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (64 + 4) << 20


def test_options():
    allowed = {"budget": object, "share": bool}
    assert _weights.options_of({"budget": "2GiB", "share": False}, allowed, "extra") == {
        "budget": "2GiB",
        "share": False,
    }
    assert _weights.options_of(None, allowed, "extra") == {}
    with pytest.raises(forebay.OptionError, match="has the option 'bugdet'.*budget, share"):
        _weights.options_of({"bugdet": 3}, allowed, "extra")
    with pytest.raises(forebay.OptionError, match="true or false"):
        _weights.options_of({"share": "no"}, allowed, "extra")
    with pytest.raises(forebay.OptionError, match="no size"):
        _weights.options_of({"budget": "much"}, allowed, "extra")
    with pytest.raises(forebay.OptionError, match="1MiB"):
        _weights.options_of({"budget": 5}, allowed, "extra")
