"""Tensors that are views of mapped files, so that they take no RAM until they are used, and the files that they are in."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from . import _native
from ._convert import torch_dtype
from ._errors import Error
from ._load import Path, open_table
from ._weights import in_natural_order

_PAGE = mmap.PAGESIZE
_LOCK = threading.Lock()
# The files that are mapped, by the address of their first byte. A map lasts as long as tensors use it.
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
_FILES: dict[int, tuple[int, _native.Table, int]] = {}


class MappedTensors:
    """The tensors of safetensors files, as views of the mapped files. Their memory is private: a change of a tensor does not change the
    file.

    It has the methods of `Tensors`, which reads instead.
    """

    def __init__(self, files: Sequence[Path] | _native.Table) -> None:
        self.table = files if isinstance(files, _native.Table) else open_table(in_natural_order(files))
        self._maps = [_mapped(self.table, at, path) for at, path in enumerate(self.table.files())]

    def plan(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Nothing is read ahead."""

    def take(self, name: str) -> Any:
        """Return a tensor on the CPU."""
        kind, _, shape, _ = self.table.facts(name)
        return self.view(self.table.place(name), torch_dtype(name, kind), shape)

    def view(self, place: tuple[int, int, int], dtype: Any, shape: Sequence[int]) -> Any:
        """Return the tensor whose bytes are in this file, from this byte on, with this number of bytes."""
        import torch

        file, offset, nbytes = place
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._maps[file], dtype=torch.uint8, offset=offset, count=nbytes)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(list(shape))

    def close(self) -> None:
        """Tensors that were taken stay valid."""

    def __enter__(self) -> MappedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_map(table: _native.Table) -> bool:
    """Return True if the files have tensors as they are in memory, and are on a disk."""
    return all(FilePath(file).suffix in (".safetensors", ".gguf") and FilePath(file).is_file() for file in table.files())


def _mapped(table: _native.Table, at: int, path: FilePath) -> mmap.mmap:
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with _LOCK:
        for gone in [address for address in _FILES if address not in _MAPS]:
            del _FILES[gone]
        _MAPS[first], _FILES[first] = memory, (len(memory), table, at)
    return memory


def file_of(address: int, nbytes: int) -> tuple[_native.Table, int, int] | None:
    """Return the table, the number of the file and the offset there of memory that is a mapped file, or None. Memory that was
    changed is no file any more."""
    with _LOCK:
        for first, (length, table, at) in _FILES.items():
            if first <= address and address + nbytes <= first + length and first in _MAPS:
                return None if _was_changed(address, nbytes) else (table, at, address - first)
    return None


def _was_changed(address: int, nbytes: int) -> bool:
    """Return True if a page of private memory is not that of its file any more."""
    import torch

    first, last = address // _PAGE, (address + nbytes - 1) // _PAGE
    wanted, data = (last - first + 1) * 8, bytearray()
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * 8)
            while len(data) < wanted and (part := file.read(wanted - len(data))):
                data += part
    except OSError as error:
        raise Error(f"it cannot be known whether weights of mapped files were changed: {error}: load the module without a stream") from None
    if len(data) < wanted:
        return True
    entries = torch.frombuffer(data, dtype=torch.int64)
    # Bit 63: in RAM, which is the sign. Bit 62: swapped out, as only pages that are no longer the file's are. Bit 61: the file's.
    is_there, is_swapped, is_of_file = entries < 0, (entries >> 62) & 1 == 1, (entries >> 61) & 1 == 1
    return bool((is_there & ~is_of_file | is_swapped).any())
