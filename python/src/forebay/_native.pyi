"""The part of forebay that is written in Rust. Use the functions of `forebay`, which call it."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

VERSION: str
EMBEDDINGS_QUEUED: int
"""Most texts of one call that wait for their embeddings."""

class Tensor:
    """A tensor in memory. `torch.from_dlpack` and `numpy.from_dlpack` take it without a copy.

    The memory is freed when this object and all tensors that were made from it are gone.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Type as the file names it, such as "BF16", "F8_E4M3" or "Q4_K"."""
    @property
    def shape(self) -> list[int]:
        """Shape in memory. Where elements share bytes, the last dimension is in bytes."""
    @property
    def element_shape(self) -> list[int]:
        """Shape in elements."""
    @property
    def nbytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory that this tensor keeps alive. Small tensors share memory."""
    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
    def view(self, dtype: str) -> Tensor:
        """Return the same memory with another type of the same size, such as "U16" for "BF16".

        Raises OptionError if there is no such type or its size differs.
        """
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Table:
    """The tensors of safetensors files, of a GGUF file or of a pack."""

    def __new__(
        cls, paths: Sequence[str | PathLike[str]], storage_options: dict[str, str] | None = None
    ) -> Table: ...
    def names(self) -> list[str]:
        """Names in the order of the data."""
    def metadata(self) -> dict[str, str] | None: ...
    def files(self) -> list[Any]: ...
    def place(self, name: str) -> tuple[int, int, int]:
        """The number of a tensor's file, its first byte there, and its bytes."""
    def facts(self, name: str) -> tuple[str, list[int], list[int], int]:
        """Type, shape in elements, shape in memory, and bytes."""

class Stream:
    def __new__(
        cls,
        table: Table,
        names: Sequence[str] | None,
        slices: dict[str, list[tuple[int, int, int]]] | None,
        device: str,
        to_f32: bool,
        budget: int,
        in_order_of_names: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stream: ...
    def next_batch(self) -> list[Tensor] | None: ...
    def close(self) -> None: ...

def load(
    table: Table,
    names: Sequence[str] | None,
    slices: dict[str, list[tuple[int, int, int]]] | None,
    device: str,
    to_f32: bool,
    progress: Callable[[int, int], object] | None,
) -> list[Tensor]: ...
def save(
    path: str | PathLike[str],
    tensors: Sequence[tuple[str, str, Sequence[int], memoryview]],
    metadata: dict[str, str] | None,
) -> None: ...

class Engine:
    """An open model whose engine runs on a thread of its own."""

    def __new__(
        cls, model: str | PathLike[str], options: str, progress: Callable[[int, int], object] | None
    ) -> Engine: ...
    def submit(
        self, is_chat: bool, body: str, wake: Wake | None = None, number: int = 0, priority: int = 0
    ) -> Run: ...
    def embed(
        self,
        text: str | Sequence[int],
        pooling: str,
        truncate: bool,
        wake: Wake | None = None,
        number: int = 0,
        priority: int = 0,
    ) -> Run: ...
    def embedding(self, state: bytes, dimensions: int | None, normalise: bool) -> bytes:
        """Return an embedding as bytes of f32, of a state in the same form."""
    def dimensions(self, wanted: int | None) -> int: ...
    def prompt(self, is_chat: bool, body: str) -> tuple[str, list[int]]: ...
    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: list[int], keep_special: bool) -> str: ...
    def statistics(self) -> str: ...
    def model(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def load_seconds(self) -> float: ...
    @property
    def running_max(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

class Wake:
    """Numbers of the requests of an event loop that have something to take."""

    def __new__(cls) -> Wake: ...
    def fileno(self) -> int:
        """File descriptor that becomes readable."""
    def take(self) -> list[int]: ...

class Run:
    """A request. Dropping it cancels it.

    An update is (id, pieces, probability), and the last one (None, pieces, (message, reason, stop, statistics)). The only
    update of a text to embed is its state, as bytes of f32.
    """

    def next(self) -> list[Any]:
        """Wait for updates and return them."""
    def all(self) -> list[Any]:
        """Wait for the end and return all updates."""
    def take(self) -> list[Any] | None:
        """Return the updates that have come, or None if there are none yet."""
    def wait_for_end(self) -> None:
        """Make updates before the end wake nobody."""
    def cancel(self) -> None: ...

def log_start(level: str) -> int:
    """Log messages down to a level such as "debug" from now on. Return the file descriptor that is readable while some
    wait."""

def log_take() -> list[tuple[int, str]]:
    """Return the messages that wait: levels of `logging`, and lines."""

def plan(
    model: str, options: str, profile: str | None, trace: str | None, prompt_tokens: int
) -> str: ...
def replay(
    trace: str, policies: list[str] | None, capacities: list[tuple[str, float]], keep_batches: bool
) -> str: ...
def assess(
    model: str,
    options: str,
    prompts: str | None,
    tokens: int,
    seed: int,
    raw: bool,
    profile: str | None,
    trace: str | None,
    progress: Callable[[int, int], object] | None,
) -> str: ...

def default_ram() -> int:
    """Three quarters of the RAM that this process can allocate, in bytes."""

class CodedModules:
    """Weights of modules outside of the device: in RAM, coded without loss, and in files."""

    def __new__(cls, threads: int, codes: bool, ram: int | None) -> CodedModules: ...
    def add_source(self, table: Table) -> int:
        """Add files that weights come from, and return the number of the source."""
    def add(self, tensors: Sequence[tuple[memoryview | tuple[int, int, int, int], str, str | None]]) -> tuple[int, list[int]]:
        """Add tensors that are used together, given by their bytes, or by source, file, offset and number of bytes, by the names of their
        types, and of those that they become where they are used. Return the number of the group, and where each tensor begins in it, in bytes."""
    @staticmethod
    def can_become(from_: str, to: str) -> bool:
        """Return true if weights of one type can become those of the other one where they are used."""
    def finish(self) -> None:
        """Note that all groups are known."""
    def read(self, group: int, tensor: int) -> bytes: ...
    def change(self, group: int, tensor: int, bytes: memoryview) -> None: ...
    def statistics(self) -> dict[str, Any]: ...

class ModuleStream:
    """The weights of modules in the memory of a device, a part of them at a time."""

    def __new__(
        cls,
        weights: CodedModules,
        units: Sequence[Sequence[int]],
        stays: Sequence[int],
        orders: Sequence[Sequence[int]],
        gpu: int | None,
        memory: int,
        stage: int,
        pinned: int,
    ) -> ModuleStream: ...
    def begin(self, root: int) -> None: ...
    def end(self) -> None: ...
    def acquire(self, unit: int, queue: int) -> list[int]:
        """Where the groups of a module begin in the memory, which work of the queue may use until `release`."""
    def release(self, unit: int, queue: int) -> None: ...
    def change(self, group: int) -> None:
        """Note that a group that is in use has other weights from now on."""
    def predict(self, root: int, more: int, more_ram: int) -> tuple[float, float, float, float] | None:
        """Seconds of a pass with so many more bytes of memory in the device and of RAM, of its work, of its loads and of its reads."""
    def memory(self, at: int) -> Tensor:
        """The group at this place in RAM, or all memory of a GPU, as bytes."""
    def statistics(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
