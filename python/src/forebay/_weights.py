"""Weights of a checkpoint for the loaders of vLLM and SGLang.

Tensors come one after the other with bounded memory. Ranks that load the same files read each byte once: every rank
reads its share and broadcasts it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import _native
from ._convert import require, torch_dtype
from ._errors import OptionError, ReadError
from ._load import Path, Slice, TensorStream, bytes_of, open_table

logger = logging.getLogger("forebay")

SMALLEST_BUDGET = 1 << 20

# Room that a stream needs beside a tensor, for the ends of aligned reads.
_SLOT = 16 << 10

# Small tensors are broadcast together, up to these bytes.
_PACK = 4 << 20

# Offset of tensors that are broadcast together. Every element type may begin there.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Ranks:
    """Processes that load the same files at the same time."""

    group: Any
    """Process group of torch.distributed that exchanges tensors of the device."""
    control: Any = None
    """Process group of the same ranks that exchanges plans. None means `group`."""

    @property
    def size(self) -> int:
        return require("torch").distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return require("torch").distributed.get_rank(self.group)

    def gather(self, mine: Any) -> list[Any]:
        """Return what all ranks give, by rank."""
        gathered = [None] * self.size
        require("torch").distributed.all_gather_object(gathered, mine, group=self.control or self.group)
        return gathered

    def broadcast(self, tensor: Any, source: int) -> None:
        """Copy a tensor from rank `source` to the others."""
        distributed = require("torch").distributed
        distributed.broadcast(tensor, src=distributed.get_global_rank(self.group, source), group=self.group)


class Entry(NamedTuple):
    """A tensor of the files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape in elements."""
    stored: tuple[int, ...]
    """Shape in memory."""
    nbytes: int


class Memory(NamedTuple):
    """How a budget is used."""

    stream: int
    """Budget of the stream that reads."""
    part: int
    """Largest part that the stream reads at once, in bytes."""
    largest: int
    """Largest tensor that the device holds. Larger ones are put together in host memory."""


@dataclass
class Parcel:
    """Tensors or a part of a tensor that one rank reads and broadcasts at once."""

    parts: list[tuple[Entry, Slice | None]]
    nbytes: int
    owner: int = -1
    is_last: bool = True
    """False for parts of a tensor that are followed by other parts of it."""


@dataclass
class Share:
    """What the ranks have agreed on."""

    shared: list[Entry]
    """Tensors that several ranks want. One reads each, and broadcasts it."""
    own: list[Entry]
    """Tensors that only this rank wants."""
    own_bytes: list[int]
    """Bytes that only one rank wants, by rank."""
    wanted: frozenset[str] = field(default_factory=frozenset)
    """Names that this rank wants."""


def options_of(given: Any, allowed: Mapping[str, type], where: str) -> dict[str, Any]:
    """Return the options of a loader, after their names and types were checked."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise OptionError(f"{where} is {given!r}, but a JSON object is needed")
    for name, value in given.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise OptionError(
                f"{where} has the option {name!r}, which load format forebay does not have: it has {known}"
            )
        if allowed[name] is bool and not isinstance(value, bool):
            raise OptionError(f"{where}: {name} is {value!r}, but true or false is needed")
    options = dict(given)
    if "budget" in options and bytes_of(options["budget"]) < SMALLEST_BUDGET:
        raise OptionError(f"{where}: budget is {options['budget']!r}, but at least 1MiB is needed")
    return options


def in_natural_order(files: Sequence[Path]) -> list[Path]:
    """Sort files so that number 10 is after number 9, on all ranks in the same way."""

    def key(file: Path) -> list[tuple[int, int | str]]:
        parts = re.split(r"(\d+)", os.path.basename(os.fspath(file)))
        return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]

    return sorted(files, key=lambda file: (key(file), os.fspath(file)))


def inside_layers(layers: Iterable[str], rename: Callable[[str], str | None] | None) -> Callable[[str], bool]:
    """Return a function that says whether a tensor is inside of one of some numbered layers.

    Args:
        layers: Names of modules. Those without a number at their end are left out: embeddings of another pipeline stage
            may be needed here, by an output layer that shares them.
        rename: Returns the name in the model for a name in the files.
    """
    prefixes = tuple(name.rstrip(".") + "." for name in layers if name.rstrip(".").rpartition(".")[2].isdigit())
    if not prefixes:
        return lambda name: False

    def is_inside(name: str) -> bool:
        renamed = name if rename is None else rename(name)
        return renamed is not None and renamed.startswith(prefixes)

    return is_inside


def read_with_bar(files: Sequence[Path], device: Any, is_shown: bool, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `read_weights` yields, and show a bar of progress."""
    from tqdm.auto import tqdm

    with tqdm(
        desc="Loading safetensors with forebay",
        disable=not is_shown,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        mininterval=1.0,
    ) as bar:
        yield from read_weights(files, device, progress=bar.update, **options)


def read_weights(
    files: Sequence[Path],
    device: Any,
    *,
    budget: int | str = "1GiB",
    ranks: Ranks | None = None,
    choose: Callable[[list[str]], Iterable[bool]] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors of PyTorch, in the order of the files.

    With several ranks, those that more than one of them wants come first, then those of this rank alone.

    Args:
        files: safetensors files.
        device: Device to load to. Tensors that are too large for the budget come in host memory.
        budget: Bytes of the device that are used at once, at most, beside what the consumer keeps.
        ranks: Processes that make the same call at the same time. Each byte is read by one of them.
        choose: Says for all names whether this rank wants the tensor. Tensors that no rank wants are not read.
        progress: Called with the bytes of each tensor before it is yielded.

    Raises:
        OptionError: The budget is too small, or the ranks see different files.
        ReadError: A file could not be read, here or on another rank.
        FileNotFoundError, FormatError, OutOfMemoryError, DeviceError: As for `forebay.load`.
    """
    limit = bytes_of(budget)
    if limit < SMALLEST_BUDGET:
        raise OptionError(f"budget is {budget!r}, but at least 1MiB is needed")
    if ranks is not None and ranks.size == 1:
        ranks = None
    try:
        table = open_table(in_natural_order(files))
        entries = [entry_of(table, name) for name in table.names()]
        names = [entry.name for entry in entries]
        mine = [True] * len(names) if choose is None else [bool(it) for it in choose(names)]
    except Exception as error:
        if ranks is not None:
            # The others wait for this rank's plan.
            ranks.gather((str(error) or type(error).__name__, None))
        raise
    if ranks is None:
        share = Share([], [entry for entry, is_mine in zip(entries, mine, strict=True) if is_mine], [0])
    else:
        share = agree(entries, mine, limit, ranks)

    def reported() -> Iterator[tuple[str, Any]]:
        if share.shared:
            assert ranks is not None
            yield from read_shared(table, share, device, limit, ranks)
        if share.own:
            yield from read_alone(table, share.own, device, limit)

    for name, tensor in reported():
        if progress is not None:
            progress(tensor.numel() * tensor.element_size())
        yield name, tensor
        del tensor


def entry_of(table: _native.Table, name: str) -> Entry:
    dtype, shape, stored, nbytes = table.facts(name)
    return Entry(name, dtype, tuple(shape), tuple(stored), nbytes)


def agree(entries: list[Entry], mine: list[bool], budget: int, ranks: Ranks) -> Share:
    """Exchange what each rank wants, and return what is read together.

    Raises OptionError if the ranks see different files or have different budgets.
    """
    digest = hashlib.sha256(repr((budget, entries)).encode()).hexdigest()
    gathered = ranks.gather((None, (digest, budget, bytes(mine))))
    for rank, (failure, _) in enumerate(gathered):
        if failure is not None:
            raise ReadError(f"rank {rank} of {len(gathered)} cannot load: {failure}")
    for rank, (_, (theirs, their_budget, _)) in enumerate(gathered):
        if their_budget != budget:
            raise OptionError(f"rank {rank} has the budget {their_budget}, but rank {ranks.rank} has {budget}")
        if theirs != digest:
            raise OptionError(
                f"rank {rank} and rank {ranks.rank} see different tensors: names, types or shapes in the files differ"
            )
    share = Share([], [], [0] * ranks.size)
    for entry, wants in zip(entries, zip(*(bits for _, (_, _, bits) in gathered), strict=True), strict=True):
        if sum(wants) > 1:
            share.shared.append(entry)
        elif sum(wants) == 1:
            owner = wants.index(1)
            share.own_bytes[owner] += entry.nbytes
            if owner == ranks.rank:
                share.own.append(entry)
    share.wanted = frozenset(entry.name for entry, is_mine in zip(entries, mine, strict=True) if is_mine)
    return share


def divide(budget: int, sizes: Sequence[int], is_shared: bool) -> Memory:
    """Divide a budget between the stream that reads and tensors that are put together from parts.

    Beside the budget of the stream, the consumer still holds the batch before, which is at most half of it. A part
    that arrives from another rank takes as much. Of tensors with memory of their own, there are two: the one that is
    put together, and the one before, which the consumer holds until it gets the next.
    """
    spare = budget - (2 * min(_PACK, budget // 16) if is_shared else 0)
    halves = 4 if is_shared else 3
    most = spare * 2 // halves
    least = spare // 16
    largest_possible = (spare - least * halves // 2) // 2
    on_device = [size for size in sizes if size <= largest_possible]
    largest = max(on_device, default=0)
    if not is_shared and largest + _SLOT <= most // 2:
        # Each leaves the stream as it is.
        return Memory(most, most // 2 - _SLOT, largest_possible)
    stream = (spare - 2 * largest) * 2 // halves
    return Memory(stream, stream // 2 - _SLOT, largest_possible)


def parts_of(entry: Entry, part: int) -> list[Slice | None]:
    """Return ranges of at most `part` bytes that are adjacent in the file. `[None]` means all of the tensor at once.

    The list is empty if one row of the tensor is larger.
    """
    if entry.nbytes <= part:
        return [None]
    dimension = next(at for at, size in enumerate(entry.shape) if size > 1)
    rows = entry.shape[dimension]
    count = part * rows // entry.nbytes
    if dimension == len(entry.shape) - 1:
        # Elements may share bytes.
        count -= count % _ALIGNMENT
    if count == 0:
        return []
    return [(dimension, start, min(start + count, rows)) for start in range(0, rows, count)]


def part_bytes(entry: Entry, part: Slice | None) -> int:
    if part is None:
        return entry.nbytes
    dimension, start, stop = part
    rows = entry.shape[dimension]
    return entry.nbytes * stop // rows - entry.nbytes * start // rows


def bytes_view(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor, as a tensor of one dimension with the same memory."""
    return tensor.reshape(-1).view(require("torch").uint8)


def typed(flat: Any, entry: Entry) -> Any:
    """Return a tensor with the type and the shape of an entry, and the memory of `flat`."""
    return flat.view(torch_dtype(entry.name, entry.dtype)).view(entry.stored)


def open_stream(
    table: _native.Table, parts: Sequence[tuple[Entry, Slice | None]], device: Any, budget: int
) -> TensorStream:
    """Start to read tensors and parts of tensors, in this order, which is that of the files."""
    names = list(dict.fromkeys(entry.name for entry, _ in parts))
    slices: dict[str, list[Slice]] = {}
    for entry, part in parts:
        if part is not None:
            slices.setdefault(entry.name, []).append(part)
    return TensorStream(_native.Stream(table, names, slices, str(device), False, budget), "torch", False)


def read_alone(table: _native.Table, entries: list[Entry], device: Any, budget: int) -> Iterator[tuple[str, Any]]:
    """Yield tensors that this rank alone reads."""
    torch = require("torch")
    memory = divide(budget, [entry.nbytes for entry in entries], False)
    parts = {entry.name: parts_of(entry, memory.part) for entry in entries if entry.nbytes <= memory.largest}
    # The stream to the host reads those whose rows are too large, too.
    in_host = [entry for entry in entries if not parts.get(entry.name)]
    report_host(in_host, budget, device)
    pieces = [(entry, part) for entry in entries for part in parts.get(entry.name, [])]
    host_budget = max((entry.nbytes for entry in in_host), default=0) + _SLOT
    with (
        open_stream(table, pieces, device, memory.stream) as stream,
        open_stream(table, [(entry, None) for entry in in_host], "cpu", host_budget) as host,
    ):
        for entry in entries:
            if not parts.get(entry.name):
                _, tensor = next(host)
            elif parts[entry.name] == [None]:
                _, tensor = next(stream)
            else:
                whole = torch.empty(entry.nbytes, dtype=torch.uint8, device=device)
                at = 0
                for _ in parts[entry.name]:
                    part = bytes_view(next(stream)[1])
                    whole[at : at + part.numel()].copy_(part)
                    at += part.numel()
                    # Its memory is free before the next part is waited for.
                    del part
                tensor = typed(whole, entry)
                del whole
            yield entry.name, tensor
            del tensor


def report_host(in_host: list[Entry], budget: int, device: Any) -> None:
    if in_host and str(device) != "cpu":
        largest = max(in_host, key=lambda entry: entry.nbytes)
        logger.warning(
            "%d tensors, %.2f GiB, come through host memory because they are too large for the budget of %d MiB: the "
            "largest is %s, for which a budget of %d MiB is enough",
            len(in_host),
            sum(entry.nbytes for entry in in_host) / 2**30,
            budget >> 20,
            largest.name,
            -(-largest.nbytes * 5 // 2 // (1 << 20)) + 16,
        )


def parcels_of(share: Share, memory: Memory, budget: int) -> list[Parcel]:
    """Divide shared tensors into parcels, and give each an owner. All ranks get the same result."""
    loads = list(share.own_bytes)
    # At least some parcels for each rank, also of a small model.
    few = sum(entry.nbytes for entry in share.shared) // (8 * len(loads))
    pack = min(_PACK, budget // 16, few)
    parcels: list[Parcel] = []
    is_open = False
    for entry in share.shared:
        parts = parts_of(entry, memory.part)
        if not parts:
            row = entry.nbytes // max(next(size for size in entry.shape if size > 1), 1)
            raise OptionError(
                f"budget is {budget}, which leaves {memory.part} bytes for a part of tensor {entry.name!r}, "
                f"but one of its rows has {row}: a budget of {-(-row * 48 // (1 << 20))}MiB is enough"
            )
        if parts != [None]:
            parcels += [Parcel([(entry, part)], part_bytes(entry, part), is_last=False) for part in parts]
            parcels[-1].is_last = True
            is_open = False
            continue
        room = -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        if is_open and parcels[-1].nbytes + room <= pack:
            parcels[-1].parts.append((entry, None))
            parcels[-1].nbytes += room
            continue
        is_open = room <= pack // 4
        parcels.append(Parcel([(entry, None)], room if is_open else entry.nbytes))
    # A rank reads several parcels that follow each other in the file, and its read-ahead reaches to its next ones.
    run = min(memory.stream // 4, few)
    owner, read = 0, run
    for parcel in parcels:
        if read >= run:
            owner, read = loads.index(min(loads)), 0
        parcel.owner = owner
        loads[owner] += parcel.nbytes
        read += parcel.nbytes
    return parcels


def read_shared(
    table: _native.Table, share: Share, device: Any, budget: int, ranks: Ranks
) -> Iterator[tuple[str, Any]]:
    """Yield tensors that several ranks want. Each rank reads its parcels and broadcasts them."""
    torch = require("torch")
    rank = ranks.rank
    memory = divide(budget, [entry.nbytes for entry in share.shared], True)
    report_host([entry for entry in share.shared if entry.nbytes > memory.largest], budget, device)
    parcels = parcels_of(share, memory, budget)
    own = [part for parcel in parcels if parcel.owner == rank for part in parcel.parts]
    failure: BaseException | None = None
    stream: TensorStream | None = None
    try:
        stream = open_stream(table, own, device, memory.stream)
    except Exception as error:
        # It is told to the others with this rank's first parcel.
        failure = error
    whole, at = None, 0
    try:
        for parcel in parcels:
            read: list[Any] = []
            if parcel.owner == rank:
                try:
                    if failure is not None:
                        raise failure
                    read = [bytes_view(next(stream)[1]) for _ in parcel.parts]
                except BaseException as error:
                    failure = error
            has_failed = torch.tensor([failure is not None and parcel.owner == rank], dtype=torch.uint8, device=device)
            ranks.broadcast(has_failed, parcel.owner)
            if has_failed.item():
                if parcel.owner == rank and failure is not None:
                    raise failure
                raise ReadError(
                    f"rank {parcel.owner} of {ranks.size} could not read tensor {parcel.parts[0][0].name!r}: "
                    "its own message says why"
                )
            entry, part = parcel.parts[0]
            if part is not None:
                is_on_host = entry.nbytes > memory.largest
                if whole is None:
                    whole = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu" if is_on_host else device)
                    at = 0
                place = whole[at : at + parcel.nbytes]
                at += parcel.nbytes
                if is_on_host:
                    arrived = read[0] if read else torch.empty(parcel.nbytes, dtype=torch.uint8, device=device)
                    ranks.broadcast(arrived, parcel.owner)
                    place.copy_(arrived)
                    del arrived
                else:
                    if read:
                        place.copy_(read[0])
                    ranks.broadcast(place, parcel.owner)
                read.clear()
                del place
                if not parcel.is_last:
                    continue
                flat, whole = whole, None
                tensors = [(entry, flat)]
            elif len(parcel.parts) == 1:
                flat = read[0] if read else torch.empty(entry.nbytes, dtype=torch.uint8, device=device)
                if entry.nbytes > 0:
                    ranks.broadcast(flat, parcel.owner)
                tensors = [(entry, flat)]
            else:
                flat = torch.empty(parcel.nbytes, dtype=torch.uint8, device=device)
                tensors, end = [], 0
                for number, (entry, _) in enumerate(parcel.parts):
                    tensors.append((entry, flat[end : end + entry.nbytes]))
                    if read:
                        tensors[-1][1].copy_(read[number])
                    end += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
                if parcel.nbytes > 0:
                    ranks.broadcast(flat, parcel.owner)
            read.clear()
            del flat
            wanted = [(entry.name, typed(flat, entry)) for entry, flat in tensors if entry.name in share.wanted]
            del tensors
            wanted.reverse()
            while wanted:
                yield wanted.pop()
    finally:
        if stream is not None:
            stream.close()
