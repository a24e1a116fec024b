"""Conversion of loaded tensors to those of a framework, without a copy."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from typing import Any

from ._errors import OptionError
from ._native import Tensor

# Types that NumPy has.
_NUMPY = {
    "F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "C64",
}  # fmt: skip

# Types that the package ml_dtypes adds to NumPy, with an integer type of the same size.
_ML_DTYPES = {
    "BF16": ("U16", "bfloat16"),
    "F8_E4M3": ("U8", "float8_e4m3fn"),
    "F8_E5M2": ("U8", "float8_e5m2"),
    "F8_E8M0": ("U8", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("U8", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("U8", "float8_e5m2fnuz"),
}

# PyTorch's types. Those with an integer type of the same size come through it, because not every version of PyTorch
# knows them in DLPack.
_TORCH = {
    "F64": (None, "float64"),
    "F32": (None, "float32"),
    "F16": (None, "float16"),
    "BF16": (None, "bfloat16"),
    "I64": (None, "int64"),
    "I32": (None, "int32"),
    "I16": (None, "int16"),
    "I8": (None, "int8"),
    "U64": ("I64", "uint64"),
    "U32": ("I32", "uint32"),
    "U16": ("I16", "uint16"),
    "U8": (None, "uint8"),
    "BOOL": ("U8", "bool"),
    "C64": (None, "complex64"),
    "F8_E4M3": ("U8", "float8_e4m3fn"),
    "F8_E5M2": ("U8", "float8_e5m2"),
    "F8_E8M0": ("U8", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("U8", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("U8", "float8_e5m2fnuz"),
    "F4": ("U8", "float4_e2m1fn_x2"),
}


def names_of_types() -> dict[Any, str]:
    """Return the names that forebay has for PyTorch's types."""
    torch = require("torch")
    return {getattr(torch, name): kind for kind, (_, name) in _TORCH.items() if hasattr(torch, name)}


_FRAMEWORKS = {
    "pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy", "raw": "raw",
}  # fmt: skip


def require(name: str) -> Any:
    """Import a package, or raise an ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        advice = ', or ask for framework="raw"' if name in ("torch", "numpy") else ""
        raise ImportError(f"this needs {name}, which is not installed: run `pip install {name}`{advice}") from None


def framework_of(name: str | None) -> str:
    """Return "torch", "numpy" or "raw". None means PyTorch if it is installed, else NumPy, else raw tensors."""
    if name is None:
        for found in ("torch", "numpy"):
            if importlib.util.find_spec(found) is not None:
                return found
        return "raw"
    try:
        found = _FRAMEWORKS[name]
    except (KeyError, TypeError):
        raise OptionError(f'framework is {name!r}, but "pt", "np", "raw" or None is needed') from None
    if found != "raw":
        require(found)
    return found


def convert(tensor: Tensor, framework: str, lenient: bool) -> Any:
    """Return a tensor of the framework that shares the memory.

    With `lenient`, a tensor that NumPy cannot hold is returned as it is. Otherwise that is an error.
    """
    if framework == "torch":
        return to_torch(tensor)
    if framework == "numpy":
        return to_numpy(tensor, lenient)
    return tensor


def to_numpy(tensor: Tensor, lenient: bool = False) -> Any:
    numpy = require("numpy")
    dtype = tensor.dtype
    if tensor.device != "cpu":
        if lenient:
            return tensor
        raise OptionError(f"tensor {tensor.name!r} is on {tensor.device}, and NumPy has arrays in host memory only")
    if dtype in _NUMPY:
        return numpy.from_dlpack(tensor)
    if dtype == "BOOL":
        return numpy.from_dlpack(tensor.view("U8")).view(bool)
    if dtype in _ML_DTYPES:
        integer, name = _ML_DTYPES[dtype]
        try:
            ml_dtypes = importlib.import_module("ml_dtypes")
        except ModuleNotFoundError:
            if lenient:
                return tensor
            raise OptionError(
                f"tensor {tensor.name!r} is of type {dtype}, which NumPy has only with the package ml_dtypes: "
                'install it, or ask for framework="pt" or "raw"'
            ) from None
        return numpy.from_dlpack(tensor.view(integer)).view(getattr(ml_dtypes, name))
    # Elements that share bytes: rows of bytes.
    return numpy.from_dlpack(tensor)


def torch_dtype(name: str, dtype: str) -> Any:
    """Return PyTorch's type for tensor `name` of type `dtype`. Types that it lacks are bytes."""
    torch = require("torch")
    found = getattr(torch, _TORCH.get(dtype, (None, "uint8"))[1], None)
    if found is None:
        raise OptionError(
            f"tensor {name!r} is of type {dtype}, which PyTorch {torch.__version__} does not have: "
            'use a later version, or ask for framework="raw"'
        )
    return found


def to_torch(tensor: Tensor) -> Any:
    # A model has thousands of tensors, so this is a few lookups and one call of PyTorch. It takes a capsule as it is: asking it to
    # take the tensor would ask CUDA for streams, and all work on the memory is done.
    torch = sys.modules.get("torch") or require("torch")
    known = _TORCH.get(tensor.dtype, (None, "uint8"))
    if known[0] is None:
        return torch.utils.dlpack.from_dlpack(tensor.__dlpack__())
    dtype = torch_dtype(tensor.name, tensor.dtype)
    return torch.utils.dlpack.from_dlpack(tensor.view(known[0]).__dlpack__()).view(dtype)


def memory_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous tensor in RAM, which must outlive them."""
    nbytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()) if nbytes else b""
    return memoryview(memory).cast("B")
