"""Load language-model weights at the speed of the disk, to RAM or a GPU, and run models.

`load` and `iter_tensors` read safetensors, GGUF files and packs. `safe_open`, `forebay.torch` and `forebay.numpy` have
the interfaces of safetensors. `Engine` opens a model and answers requests.
"""

from ._answer import Answer, Delta, TokenLogprob, ToolCall, ToolCallDelta, Usage
from ._engine import Engine
from ._errors import (
    DeviceError,
    EngineError,
    Error,
    FormatError,
    OptionError,
    OutOfMemoryError,
    ProfileError,
    QueueFullError,
    ReadError,
    SharedMemoryError,
    TensorNotFoundError,
    WriteError,
)
from ._load import TensorInfo, TensorStream, iter_tensors, list_tensors, load
from ._measure import Assessment, MissCurve, Plan, Replay, assess, plan, replay
from ._native import VERSION as __version__
from ._native import Tensor
from ._requests import ChatOptions, Options
from ._safe_open import TensorSlice, safe_open
from ._streams import AsyncStream, Stream

__all__ = [
    "Answer",
    "Assessment",
    "AsyncStream",
    "ChatOptions",
    "Delta",
    "DeviceError",
    "Engine",
    "EngineError",
    "Error",
    "FormatError",
    "MissCurve",
    "OptionError",
    "Options",
    "OutOfMemoryError",
    "Plan",
    "ProfileError",
    "QueueFullError",
    "ReadError",
    "Replay",
    "SharedMemoryError",
    "Stream",
    "Tensor",
    "TensorInfo",
    "TensorNotFoundError",
    "TensorSlice",
    "TensorStream",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WriteError",
    "__version__",
    "assess",
    "iter_tensors",
    "list_tensors",
    "load",
    "plan",
    "replay",
    "safe_open",
]
