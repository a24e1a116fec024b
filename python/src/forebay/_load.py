"""Loads of files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from . import _log, _native
from ._convert import convert, framework_of
from ._errors import OptionError
from ._progress import Progress, watched

Path = str | os.PathLike[str]
Paths = Path | Iterable[Path]
Slice = tuple[int, int, int]
Slices = Mapping[str, Slice]
StorageOptions = Mapping[str, str | int | float | bool]

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """What a file says about a tensor."""

    dtype: str
    """Type as the file names it, such as "BF16" or "Q4_K"."""
    shape: tuple[int, ...]
    """Shape in elements, outermost dimension first."""
    nbytes: int
    """Bytes of the elements in the file."""


def open_table(paths: Paths, storage_options: StorageOptions | None = None) -> _native.Table:
    _log.follow_loads()
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    return _native.Table([os.fspath(path) for path in paths], texts_of(storage_options))


def texts_of(storage_options: StorageOptions | None) -> dict[str, str] | None:
    """Return options of a store as texts, with sizes in bytes."""
    if storage_options is None:
        return None
    texts = {}
    for name, value in storage_options.items():
        if name == "request_bytes":
            value = bytes_of(value)
        elif isinstance(value, bool):
            value = "true" if value else "false"
        elif not isinstance(value, (str, int, float)):
            raise OptionError(f"storage_options: {name!r} is {value!r}, but a text or a number is needed")
        texts[str(name)] = str(value)
    return texts


def bytes_of(size: int | str) -> int:
    """Return the bytes of a size such as 1000, "512MiB" or "2GB". A text needs a unit."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size >= 0:
            return size
    elif isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if found and not found[2] and float(found[1]) > 0:
            raise OptionError(f'{size!r} has no unit: give "{found[1]}GiB", or a number for bytes')
        if found and found[2].upper() in _UNITS:
            return int(float(found[1]) * _UNITS[found[2].upper()])
    raise OptionError(f'{size!r} is no size: give bytes as a number, or a text such as "512MiB" or "2GB"')


def is_f32(dtype: Any) -> bool:
    """Return True for "float32" and False for None. Other types are errors."""
    if dtype is None:
        return False
    if str(dtype).rpartition(".")[2] in ("float32", "F32") or getattr(dtype, "__name__", "") == "float32":
        return True
    raise OptionError(f'dtype is {dtype!r}, but only None (as in the file) and "float32" are possible')


def checked_slices(
    table: _native.Table, slices: Mapping[str, Slice | list[Slice]] | None
) -> dict[str, list[Slice]] | None:
    if slices is None:
        return None
    checked = {}
    for name, given in slices.items():
        dimensions = len(table.facts(name)[1])
        ranges = given if isinstance(given, list) else [given]
        checked[name] = [checked_slice(name, dimensions, part) for part in ranges]
    return checked


def checked_slice(name: str, dimensions: int, given: Any) -> Slice:
    try:
        dimension, start, stop = (int(number) for number in given)
    except (TypeError, ValueError):
        raise OptionError(
            f"the slice of tensor {name!r} is {given!r}, but (dimension, start, stop) is needed"
        ) from None
    if dimension < 0:
        dimension += dimensions
    if dimension < 0 or start < 0 or stop < 0:
        raise OptionError(
            f"the slice of tensor {name!r} is {given!r}, but the tensor has {dimensions} dimensions, "
            "and start and stop must not be negative"
        )
    return dimension, start, stop


def load(
    folder_or_files: Paths,
    device: Any = "cpu",
    dtype: Any = None,
    tensors: Iterable[str] | None = None,
    slices: Slices | None = None,
    progress: Progress = None,
    *,
    framework: str | None = None,
    storage_options: StorageOptions | None = None,
) -> dict[str, Any]:
    """Load tensors to memory and return them by name, in the order of the files.

    Args:
        folder_or_files: A folder of safetensors files, one file (safetensors, GGUF or a pack), or several safetensors
            files. URLs of object stores and HTTP servers are possible: s3://, gs://, az://, http:// and https://.
        device: "cpu", "cuda" or "cuda:N".
        dtype: None keeps the types of the file. "float32" makes float32 of all weights, also of quantised ones.
            Integers and bools stay.
        tensors: Names to load. None means all.
        slices: Ranges by name: `(dimension, start, stop)`, in elements. Only these parts of the files are read, and of
            packs the chunks that hold them.
        progress: Called about 20 times per second with the bytes that are done and the bytes in total. An exception
            that it raises ends the load. True shows a bar (needs tqdm).
        framework: "pt" for PyTorch, "np" for NumPy, or "raw" for `forebay.Tensor`. None means PyTorch if it is
            installed, else NumPy. NumPy has no type for some tensors, such as BF16; None leaves these raw.
        storage_options: For URLs: settings of the store, such as `{"aws_region": "eu-west-1"}`, and `connections`
            (requests at a time, 64), `request_bytes` (largest request, "16MiB"), `retries` (of a request, 10) and
            `hedge` (ask once more where an answer is late, True).

    Returns:
        A dict of tensors. Each has the shape of the file, or of its slice. Quantised blocks are uint8, with the last
        dimension in bytes; `list_tensors` has their types.

    Raises:
        FileNotFoundError: A file or an object does not exist.
        PermissionError: A file or an object must not be read.
        FormatError: A file is damaged or of an unknown format.
        TensorNotFoundError: There is no tensor of a name.
        OptionError: An argument is wrong, such as a slice outside of its tensor.
        OutOfMemoryError: The tensors do not fit into memory.
        ReadError: A file could not be read, or became shorter. A server failed too often, or an object changed.
        DeviceError: The GPU cannot be used.
        KeyboardInterrupt: The user pressed Ctrl-C. All memory is freed.
    """
    wanted = framework_of(framework)
    table = open_table(folder_or_files, storage_options)
    names = None if tensors is None else list(dict.fromkeys(tensors))
    for name, given in (slices or {}).items():
        if isinstance(given, list):
            raise OptionError(f"tensor {name!r} has a list of slices, which only iter_tensors takes")
    chosen = checked_slices(table, slices)
    with watched(progress, "Loading weights", "B") as update:
        loaded = _native.load(table, names, chosen, str(device), is_f32(dtype), update)
    _log.deliver_loads()
    return {tensor.name: convert(tensor, wanted, framework is None) for tensor in loaded}


class TensorStream(Iterator[tuple[str, Any]]):
    """Names and tensors in the order of the files. `iter_tensors` makes it.

    Use it in a `with` statement or call `close` to stop reading early. Dropping it does the same.
    """

    def __init__(self, stream: _native.Stream, framework: str, lenient: bool) -> None:
        self._stream = stream
        self._framework = framework
        self._lenient = lenient
        self._batch: list[_native.Tensor] = []
        self._is_over = False

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        while not self._batch:
            if self._is_over:
                raise StopIteration
            batch = self._stream.next_batch()
            if batch is None:
                self.close()
                raise StopIteration
            batch.reverse()
            self._batch = batch
        tensor = self._batch.pop()
        return tensor.name, convert(tensor, self._framework, self._lenient)

    def close(self) -> None:
        """Stop reading, and free what was read ahead. Tensors that were returned stay valid."""
        self._is_over = True
        self._batch = []
        self._stream.close()

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def iter_tensors(
    folder_or_files: Paths,
    device: Any = "cpu",
    dtype: Any = None,
    tensors: Iterable[str] | None = None,
    slices: Mapping[str, Slice | list[Slice]] | None = None,
    *,
    budget: int | str = "1GiB",
    progress: Callable[[int, int], object] | None = None,
    framework: str | None = None,
    storage_options: StorageOptions | None = None,
) -> TensorStream:
    """Return an iterator over names and tensors, in the order of the files. It reads ahead.

    Args:
        slices: As for `load`. A list of ranges is possible, too: the tensor is then loaded once for each of them, in the
            order of the list.
        budget: Bytes, or a text such as "512MiB". Tensors that are being read, that are read ahead, and the last one
            with its neighbours take no more. Tensors that the caller keeps longer are not counted.
        progress: Called with the bytes that are read, also ahead, and the bytes in total: while the iterator waits, about
            20 times per second, and when it returns a tensor. An exception that it raises ends the load.

    The other arguments, the tensors and the exceptions are those of `load`.

    Raises:
        OptionError: One tensor alone needs more than the budget.
    """
    wanted = framework_of(framework)
    table = open_table(folder_or_files, storage_options)
    names = None if tensors is None else list(dict.fromkeys(tensors))
    chosen = checked_slices(table, slices)
    stream = _native.Stream(
        table, names, chosen, str(device), is_f32(dtype), bytes_of(budget), progress=progress
    )
    return TensorStream(stream, wanted, framework is None)


def list_tensors(folder_or_files: Paths, *, storage_options: StorageOptions | None = None) -> dict[str, TensorInfo]:
    """Return what files say about their tensors, by name, in the order of the data. Only headers are read.

    The arguments are those of `load`.

    Raises:
        FileNotFoundError: A file or an object does not exist.
        PermissionError: A file or an object must not be read.
        FormatError: A file is damaged or of an unknown format.
    """
    table = open_table(folder_or_files, storage_options)
    listed = {}
    for name in table.names():
        dtype, shape, _, nbytes = table.facts(name)
        listed[name] = TensorInfo(dtype, tuple(shape), nbytes)
    return listed
