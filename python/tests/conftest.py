"""Files and helpers for the tests."""

import json
import os
import pathlib
import struct

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Bytes of `elements` elements of every type of safetensors.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip


def fixtures() -> pathlib.Path:
    """Return the folder of fixtures, as the tests in Rust find it."""
    for folder in (os.environ.get("FOREBAY_FIXTURES"), ROOT / "../shared/fixtures", ROOT / "fixtures"):
        if folder and pathlib.Path(folder).is_dir():
            return pathlib.Path(folder)
    raise AssertionError("the project's own fixtures/ are always there")


def size_of(dtype: str, shape: list[int]) -> int:
    elements = 1
    for dim in shape:
        elements *= dim
    assert elements * BITS[dtype] % 8 == 0
    return elements * BITS[dtype] // 8


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata=None):
    """Write a file without the package safetensors."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        assert len(content) == size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def every_type(tmp_path):
    """A file with tensors of every type: a matrix, a scalar where that is possible, and one without elements."""
    tensors = {}
    for number, dtype in enumerate(BITS):
        for kind, shape in (("matrix", [6, 8]), ("scalar", []), ("empty", [3, 0, 4])):
            if kind == "scalar" and BITS[dtype] < 8:
                continue
            size = size_of(dtype, shape)
            content = bytes((number * 31 + at * 7) % (2 if dtype == "BOOL" else 251) for at in range(size))
            tensors[f"{dtype}.{kind}"] = (dtype, shape, content)
    path = tmp_path / "every.safetensors"
    write_safetensors(path, tensors, {"format": "pt", "made": "by hand"})
    return path, tensors


@pytest.fixture
def random_file(tmp_path):
    """A function that writes F32 tensors of random numbers, and returns the path and the arrays."""
    numpy = pytest.importorskip("numpy")

    def made(shapes, name="random.safetensors"):
        rng = numpy.random.default_rng(7)
        arrays = {f"t{at}": rng.standard_normal(shape).astype(numpy.float32) for at, shape in enumerate(shapes)}
        tensors = {key: ("F32", list(array.shape), array.tobytes()) for key, array in arrays.items()}
        write_safetensors(tmp_path / name, tensors)
        return tmp_path / name, arrays

    return made


def raw_bytes(tensor) -> bytes:
    """Return the bytes of a forebay.Tensor in host memory."""
    numpy = pytest.importorskip("numpy")
    if tensor.nbytes == 0:
        return b""
    if tensor.dtype == "BOOL" or BITS.get(tensor.dtype) == 8:
        return numpy.from_dlpack(tensor.view("U8")).tobytes()
    if tensor.dtype == "BF16":
        return numpy.from_dlpack(tensor.view("U16")).tobytes()
    return numpy.from_dlpack(tensor).tobytes()
