"""Load language-model weights at the speed of the disk, to RAM or a GPU.

`load` and `iter_tensors` read safetensors, GGUF files and packs. `safe_open`, `forebay.torch` and `forebay.numpy` have
the interfaces of safetensors.
"""

from ._errors import (
    DeviceError,
    Error,
    FormatError,
    OptionError,
    OutOfMemoryError,
    ReadError,
    SharedMemoryError,
    TensorNotFoundError,
    WriteError,
)
from ._load import TensorInfo, TensorStream, iter_tensors, list_tensors, load
from ._native import VERSION as __version__
from ._native import Tensor
from ._safe_open import TensorSlice, safe_open

__all__ = [
    "DeviceError",
    "Error",
    "FormatError",
    "OptionError",
    "OutOfMemoryError",
    "ReadError",
    "SharedMemoryError",
    "Tensor",
    "TensorInfo",
    "TensorNotFoundError",
    "TensorSlice",
    "TensorStream",
    "WriteError",
    "__version__",
    "iter_tensors",
    "list_tensors",
    "load",
    "safe_open",
]
