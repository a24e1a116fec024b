"""The interface of `safetensors.safe_open`."""

from __future__ import annotations

from typing import Any

from . import _native
from ._convert import convert, framework_of
from ._errors import Error, OptionError
from ._load import Path, StorageOptions, open_table


class safe_open:
    """Open a file and read its tensors one by one. It has the interface of `safetensors.safe_open`.

    Args:
        filename: A safetensors file, a folder, a GGUF file or a pack, or the URL of one.
        framework: "pt" or "np".
        device: "cpu", "cuda", "cuda:N" or a number of a GPU.
        storage_options: Settings of the store of a URL, as for `forebay.load`.

    Raises:
        FileNotFoundError: The file does not exist.
        FormatError: The file is damaged or of an unknown format.
    """

    def __init__(
        self,
        filename: Path,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        storage_options: StorageOptions | None = None,
    ) -> None:
        self._framework = framework_of(framework)
        self._device = f"cuda:{device}" if type(device) is int else str(device)
        self._table: _native.Table | None = open_table(filename, storage_options)

    def _open(self) -> _native.Table:
        if self._table is None:
            raise Error("the file is closed")
        return self._table

    def __enter__(self) -> safe_open:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._table = None

    def keys(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._open().names())

    def offset_keys(self) -> list[str]:
        """Return all names in the order of the data."""
        return self._open().names()

    def metadata(self) -> dict[str, str] | None:
        """Return the texts that the file has beside its tensors, or None."""
        return self._open().metadata()

    def get_tensor(self, name: str) -> Any:
        """Read a tensor. Nothing else is read.

        Raises TensorNotFoundError, and the exceptions of `forebay.load`.
        """
        return self._read([name], None)[0]

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors."""
        names = self.offset_keys()
        return dict(zip(names, self._read(names, None), strict=True))

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that reads the parts of a tensor that it is indexed with.

        Raises TensorNotFoundError.
        """
        return TensorSlice(self, name, *self._open().facts(name)[:3])

    def _read(self, names: list[str], slices: dict[str, list[tuple[int, int, int]]] | None) -> list[Any]:
        loaded = _native.load(self._open(), names, slices, self._device, False, None)
        return [convert(tensor, self._framework, False) for tensor in loaded]


class TensorSlice:
    """A tensor that is not read yet. `x[2:8]` reads these rows only, and `x[:, 2:8]` little more than these columns."""

    def __init__(self, file: safe_open, name: str, dtype: str, shape: list[int], stored: list[int]) -> None:
        self._file = file
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._stored = stored

    def get_shape(self) -> list[int]:
        """Return the shape in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the type as the file names it, such as "BF16"."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        """Read a part of the tensor. Numbers, ranges and `...` are possible, and the result is contiguous.

        Raises IndexError if the tensor has fewer dimensions or entries.
        """
        indices = self._indices(index)
        ranges = [self._range(dimension, part) for dimension, part in enumerate(indices)]
        best = min(range(len(ranges)), key=lambda it: self._share(it, ranges[it]), default=None)
        if best is None or self._share(best, ranges[best]) == 1:
            tensor = self._file._read([self._name], None)[0]
        else:
            start, stop = ranges[best]
            tensor = self._file._read([self._name], {self._name: [(best, start, stop)]})[0]
            # What was read begins at `start`.
            part = indices[best]
            indices[best] = part - start if isinstance(part, int) else slice(None, None, part.step)
        if all(isinstance(part, slice) and part == slice(None) for part in indices):
            return tensor
        part = tensor[tuple(indices)]
        # A view would keep all that was read.
        if hasattr(part, "clone"):
            return part.clone()
        return part.copy() if hasattr(part, "copy") else part

    def _indices(self, index: Any) -> list[Any]:
        """Return one number or range for each dimension."""
        given = list(index) if isinstance(index, tuple) else [index]
        if sum(part is Ellipsis for part in given) > 1:
            raise IndexError(f"tensor {self._name!r}: an index can have one ... only")
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given[at : at + 1] = [slice(None)] * (len(self._stored) - len(given) + 1)
        if len(given) > len(self._stored):
            raise IndexError(f"tensor {self._name!r} has {len(self._stored)} dimensions, not {len(given)}")
        given += [slice(None)] * (len(self._stored) - len(given))
        indices: list[Any] = []
        for dimension, part in enumerate(given):
            size = self._stored[dimension]
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                if step < 1:
                    raise OptionError(f"tensor {self._name!r}: the step of a range must be at least 1")
                is_whole = (start, step) == (0, 1) and stop == size
                indices.append(slice(None) if is_whole else slice(start, max(start, stop), step))
                continue
            try:
                number = part.__index__()
            except AttributeError:
                raise OptionError(
                    f"tensor {self._name!r}: an index must be a number, a range or ..., not {part!r}"
                ) from None
            if not -size <= number < size:
                raise IndexError(f"tensor {self._name!r}: {number} is outside of dimension {dimension} of size {size}")
            indices.append(number % size)
        return indices

    def _range(self, dimension: int, part: Any) -> tuple[int, int]:
        if isinstance(part, slice):
            start, stop, _ = part.indices(self._stored[dimension])
            return start, stop
        return part, part + 1

    def _share(self, dimension: int, wanted: tuple[int, int]) -> float:
        """Return the share of the tensor that is read if this dimension is cut."""
        size = self._stored[dimension]
        # Where elements share bytes, the last dimension is cut after reading.
        if size == 0 or size != self._shape[dimension]:
            return 1
        return (wanted[1] - wanted[0]) / size
