"""The part of forebay that is written in Rust. Use the functions of `forebay`, which call it."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

VERSION: str

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

    def __new__(cls, paths: Sequence[str | PathLike[str]]) -> Table: ...
    def names(self) -> list[str]:
        """Names in the order of the data."""
    def metadata(self) -> dict[str, str] | None: ...
    def files(self) -> list[Any]: ...
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
