"""`load_file` and `save_file` of `safetensors.torch`, and modules whose weights are larger than VRAM."""

from __future__ import annotations

from typing import Any

from . import _native
from ._convert import memory_of, names_of_types, require
from ._errors import OptionError, SharedMemoryError
from ._load import Path, load

__all__ = ["ModuleStatistics", "ModuleStream", "PassPlan", "load_file", "save_file", "stream"]


def __getattr__(name: str) -> Any:
    # These need PyTorch when they are defined.
    if name in ("ModuleStatistics", "ModuleStream", "PassPlan", "stream"):
        from . import _modules

        return getattr(_modules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_file(filename: Path, device: Any = "cpu") -> dict[str, Any]:
    """Load a file to tensors of PyTorch, as `safetensors.torch.load_file` does.

    Args:
        filename: A safetensors file, a folder, a GGUF file or a pack.
        device: "cpu", "cuda", "cuda:N", a `torch.device` or a number of a GPU.

    Raises the exceptions of `forebay.load`.
    """
    require("torch")
    return load(filename, device=f"cuda:{device}" if type(device) is int else device, framework="pt")


def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, as `safetensors.torch.save_file` does.

    The file is written under a temporary name, synced to the disk and then renamed. An existing file is replaced,
    and stays as it was if something fails.

    Args:
        tensors: Contiguous tensors by name. Tensors on a GPU are copied to the host first.
        metadata: Texts by name.

    Raises:
        OptionError: A value is no dense contiguous tensor, or its type cannot be saved.
        SharedMemoryError: Two tensors share memory.
        WriteError: The file cannot be written.
    """
    torch = require("torch")
    names = names_of_types()
    kept, owners, entries = [], {}, []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise OptionError(f"{name!r} is no tensor of PyTorch but {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise OptionError(f"tensor {name!r} is sparse: make it dense before it is saved")
        if not tensor.is_contiguous():
            raise OptionError(f"tensor {name!r} is not contiguous: call .contiguous() before it is saved")
        if tensor.dtype not in names:
            raise OptionError(f"tensor {name!r} is of type {tensor.dtype}, which safetensors cannot hold")
        if tensor.numel() > 0:
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            if storage in owners:
                raise SharedMemoryError(
                    f"tensors {owners[storage]!r} and {name!r} share memory: save one of them, or a clone"
                )
            owners[storage] = name
        host = tensor.detach().cpu()
        kept.append(host)
        shape = list(host.shape)
        if names[tensor.dtype] == "F4" and shape:
            shape[-1] *= 2
        entries.append((name, names[tensor.dtype], shape, memory_of(host)))
    _native.save(filename, entries, metadata)
