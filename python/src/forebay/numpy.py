"""`load_file` and `save_file` of `safetensors.numpy`."""

from __future__ import annotations

from typing import Any

from . import _native
from ._convert import _ML_DTYPES, require
from ._errors import OptionError
from ._load import Path, load

__all__ = ["load_file", "save_file"]

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    **{name: kind for kind, (_, name) in _ML_DTYPES.items()},
}  # fmt: skip


def load_file(filename: Path) -> dict[str, Any]:
    """Load a file to arrays of NumPy, as `safetensors.numpy.load_file` does.

    Types that NumPy lacks, such as BF16, need the package ml_dtypes.

    Raises the exceptions of `forebay.load`.
    """
    require("numpy")
    return load(filename, framework="np")


def save_file(tensor_dict: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Write arrays to a safetensors file, as `safetensors.numpy.save_file` does.

    The file is written under a temporary name, synced to the disk and then renamed. An existing file is replaced,
    and stays as it was if something fails. Arrays that are not contiguous are copied.

    Raises:
        OptionError: A value is no array, or its type cannot be saved.
        WriteError: The file cannot be written.
    """
    numpy = require("numpy")
    entries = []
    for name, array in tensor_dict.items():
        if not isinstance(array, numpy.ndarray):
            raise OptionError(f"{name!r} is no array of NumPy but {type(array).__name__}")
        if array.dtype.name not in _NAMES:
            raise OptionError(f"array {name!r} is of type {array.dtype}, which safetensors cannot hold")
        shape = list(array.shape)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        entries.append((name, _NAMES[array.dtype.name], shape, memoryview(flat)))
    _native.save(filename, entries, metadata)
