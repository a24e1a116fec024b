"""Tensors for libraries that ask for them by name, in an order that is known before."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from ._convert import to_torch, torch_dtype
from ._errors import Error, OptionError
from ._load import Path, TensorStream, bytes_of, open_table
from ._mapped import MappedTensors
from ._safe_open import TensorSlice, safe_open
from ._weights import SMALLEST_BUDGET, in_natural_order

# Room that a stream needs beside a tensor, for the ends of aligned reads.
_SLOT = 16 << 10


@dataclass
class Reading:
    """That forebay reads for a library at present."""

    budget: int
    maps: bool = False
    """True if tensors are views of mapped files instead of being read."""
    loads: int = 0
    """Loads of the library that forebay has read for."""

    def tensors(self, files: Sequence[Path]) -> Tensors | MappedTensors:
        return MappedTensors(files) if self.maps else Tensors(files, self.budget)


def new_reading(budget: int | str, maps: bool = False) -> Reading:
    """Return a new state. Raises OptionError if the budget is no size, or too small."""
    limit = bytes_of(budget)
    if limit < SMALLEST_BUDGET:
        raise OptionError(f"budget is {budget!r}, but at least 1MiB is needed")
    return Reading(limit, maps)


def stream_options(stream: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `forebay.torch.stream`, or None without a stream. Other arguments of a load then need not name a device."""
    if stream is None:
        return None
    options = dict(stream) if isinstance(stream, Mapping) else {"vram": stream}
    if wrong := sorted(options.keys() & {"module", "source"}):
        raise OptionError(f"stream has {wrong[0]!r}, which the load itself gives")
    if kwargs.get("device_map") is not None:
        raise OptionError("stream and device_map exclude each other: the device is an argument of the stream")
    return options


def streamed(loaded: Any, options: dict[str, Any]) -> Any:
    """Stream a model, or all models of a pipeline."""
    import torch

    from ._modules import stream

    parts = [loaded]
    if not isinstance(loaded, torch.nn.Module):
        found = [part for part in loaded.components.values() if isinstance(part, torch.nn.Module)]
        parts = [part.eval() for part in found if next(part.parameters(), None) is not None]
    return stream(parts, **options)


def device_name(device: Any) -> str:
    """Return the device that forebay reads to for a device of PyTorch: a GPU of NVIDIA, or the CPU."""
    import torch

    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda" or torch.version.cuda is None:
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if found.index is None else found.index}"


class Tensors:
    """Tensors of safetensors files that are read ahead, in the order in which they are going to be taken.

    Several threads may take tensors at once, roughly in the order. Tensors of a GPU are copied to memory of PyTorch, so
    that its allocator knows them.

    Args:
        files: safetensors files.
        budget: Bytes of each device that are used beside the tensors that were taken.
    """

    def __init__(self, files: Sequence[Path], budget: int | str) -> None:
        self.files = in_natural_order(files)
        self.table = open_table(self.files)
        self.budget = bytes_of(budget)
        self._lanes: dict[str, _Lane] = {}
        self._device_of: dict[str, str] = {}

    def plan(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Start to read tensors, given by name and device, in this order."""
        self.close()
        by_device: dict[str, list[str]] = {}
        largest = 0
        for name, asked in wanted:
            nbytes = self.table.facts(name)[3]
            # It passes through host memory if it is too large for the budget. The caller moves it to its device.
            device = asked if nbytes + _SLOT <= self.budget // 2 else "cpu"
            by_device.setdefault(device, []).append(name)
            self._device_of[name] = device
            largest = max(largest, nbytes)
        for device, names in by_device.items():
            # Beside the stream's own budget, tensors of the batch before may not be taken yet.
            budget = max(self.budget // 2, largest + _SLOT) if device == "cpu" else self.budget // 2
            stream = _native.Stream(self.table, names, None, device, False, budget, True)
            self._lanes[device] = _Lane(TensorStream(stream, "torch", False), names)

    def take(self, name: str) -> Any:
        """Return a tensor. It is on its planned device, or on the CPU.

        A tensor that is not planned, or was taken before, is read alone.
        """
        lane = self._lanes.get(self._device_of.get(name, ""))
        tensor = lane.take(name) if lane is not None else None
        if tensor is None:
            tensor = to_torch(_native.load(self.table, [name], None, "cpu", False, None)[0])
        return tensor if tensor.device.type == "cpu" else tensor.clone()

    def close(self) -> None:
        """Stop reading. Tensors that were taken stay valid."""
        for lane in self._lanes.values():
            lane.stream.close()
        self._lanes = {}
        self._device_of = {}

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lane:
    """Tensors that go to one device."""

    def __init__(self, stream: TensorStream, names: list[str]) -> None:
        self.stream = stream
        self.lock = threading.Lock()
        self.coming = set(names)
        self.arrived: dict[str, Any] = {}
        self.failure: BaseException | None = None

    def take(self, name: str) -> Any | None:
        """Return a tensor, or None if it was taken before."""
        with self.lock:
            if name in self.arrived:
                return self.arrived.pop(name)
            if name not in self.coming:
                return None
            while True:
                if self.failure is not None:
                    raise self.failure
                try:
                    found, tensor = next(self.stream)
                except StopIteration:
                    self.failure = Error(f"the load was ended before tensor {name!r} was read")
                    continue
                except BaseException as failure:
                    self.failure = failure
                    raise
                self.coming.discard(found)
                if found == name:
                    return tensor
                self.arrived[found] = tensor


class LazyTensor(TensorSlice):
    """A tensor that is read when it is used, with what libraries ask of safetensors' own slices and of tensors."""

    def __init__(self, tensors: Tensors | MappedTensors, name: str) -> None:
        file = safe_open.__new__(safe_open)
        file._framework, file._device, file._table = "torch", "cpu", tensors.table
        super().__init__(file, name, *tensors.table.facts(name)[:3])
        self._tensors = tensors

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return self._tensors.take(self._name)
        return super().__getitem__(index)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> Any:
        import torch

        return torch.Size(self._stored)

    @property
    def dtype(self) -> Any:
        return torch_dtype(self._name, self._dtype)
