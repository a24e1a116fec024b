"""Loads to a GPU. A driver whose device memory is host memory stands in for CUDA, as in the tests of the C API."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, fixtures
from servers import RangeServer
from test_packs import models  # noqa: F401

CONTENT = '''
import ctypes, gc, sys
import forebay, numpy

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

def content(tensor):
    """Return the bytes of a tensor in memory of the GPU, which is host memory here."""
    if tensor.nbytes == 0:
        return b""
    capsule = tensor.__dlpack__(stream=1)
    managed = pointer(capsule, b"dltensor")
    address = ctypes.c_void_p.from_address(managed).value
    assert address % 256 == 0
    assert ctypes.c_int32.from_address(managed + 8).value == 2
    return ctypes.string_at(address, tensor.nbytes)
'''

PROGRAM = (
    CONTENT
    + '''
path, blocks = sys.argv[1:]
for file in (path, blocks):
    on_cpu = forebay.load(file, framework="raw")
    on_gpu = forebay.load(file, framework="raw", device="cuda:0")
    assert on_cpu.keys() == on_gpu.keys()
    for name, tensor in on_gpu.items():
        assert (tensor.device, tensor.__dlpack_device__()) == ("cuda:0", (2, 0))
        host = on_cpu[name]
        if host.nbytes and host.dtype in ("F32", "U8"):
            assert content(tensor) == numpy.from_dlpack(host).tobytes(), name
        else:
            assert (tensor.dtype, tensor.shape) == (host.dtype, host.shape)
    del on_gpu, tensor

slices = {"t0": (1, 100, 600), "t1": (0, 3, 5), "t2": (2, 1, 2)}
on_cpu = forebay.load(path, slices=slices, framework="raw")
on_gpu = forebay.load(path, slices=slices, framework="raw", device="cuda")
for name, tensor in on_gpu.items():
    assert content(tensor) == numpy.from_dlpack(on_cpu[name]).tobytes(), name
empty = forebay.load(path, tensors=["t0"], slices={"t0": (0, 5, 5)}, framework="raw", device="cuda")["t0"]
assert (empty.device, empty.shape, content(empty)) == ("cuda:0", [0, 700], b"")
streamed = dict(forebay.iter_tensors(path, device="cuda:0", budget="64MiB", framework="raw"))
assert list(streamed) == list(on_cpu)
for file in (path, blocks):
    on_cpu = forebay.load(file, dtype="float32", framework="raw")
    reports = []
    on_gpu = forebay.load(file, dtype="float32", framework="raw", device="cuda", progress=lambda *of: reports.append(of))
    assert reports[-1][0] == reports[-1][1] > 0
    # So small a budget gives small batches.
    for tensors in (on_gpu, dict(forebay.iter_tensors(file, dtype="float32", framework="raw", device="cuda", budget="8MiB"))):
        assert tensors.keys() == on_cpu.keys()
        for name, tensor in tensors.items():
            assert (tensor.dtype, tensor.shape) == (on_cpu[name].dtype, on_cpu[name].shape)
            if tensor.dtype == "F32" and tensor.nbytes:
                assert content(tensor) == numpy.from_dlpack(on_cpu[name]).tobytes(), name
del on_gpu, tensors, tensor
try:
    forebay.load(path, device="cuda:0", framework="np")
except forebay.OptionError as error:
    assert "host memory" in str(error)
else:
    raise AssertionError("NumPy has arrays in host memory only")
print("ok")
'''
)

OF_PACKS = (
    CONTENT
    + '''
plain, compressed = sys.argv[1:]
stack, matrix = "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.weight"
for slices in ({stack: (0, 1, 3)}, {stack: (1, 2, 9)}, {stack: (2, 100, 150), matrix: (1, 7, 8)}, {matrix: (0, 5, 5)}):
    on_cpu = forebay.load(plain, tensors=slices, slices=slices, framework="raw")
    for pack in (plain, compressed):
        on_gpu = forebay.load(pack, tensors=slices, slices=slices, framework="raw", device="cuda")
        for name, tensor in on_gpu.items():
            host = on_cpu[name]
            assert (tensor.dtype, tensor.shape) == (host.dtype, host.shape)
            assert not host.nbytes or content(tensor) == numpy.from_dlpack(host.view("U16")).tobytes(), (name, slices)
whole = forebay.load(plain, tensors=[stack, matrix], framework="raw", device="cuda")
assert content(whole[matrix]) == numpy.from_dlpack(forebay.load(plain, framework="raw")[matrix].view("U16")).tobytes()
print("ok")
'''
)


OF_MANY = (
    CONTENT
    + '''
# The device has 1 GiB, and gives memory in units of 2 MiB.
[path] = sys.argv[1:]
on_cpu = forebay.load(path, framework="raw")
many = [forebay.load(path, framework="raw", device="cuda") for _ in range(100)]
many += [dict(forebay.iter_tensors(path, framework="raw", device="cuda", budget="8MiB")) for _ in range(100)]
for tensors in many:
    for name, tensor in tensors.items():
        assert content(tensor) == numpy.from_dlpack(on_cpu[name]).tobytes(), name
print("ok")
'''
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("LOADS TO A GPU NOT CHECKED: there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "crates" / "forebay-c"
    library = folder / "libcuda.so.1"
    command = [compiler, "-std=c11", "-O2", "-shared", "-fPIC", "-pthread", "-I", source / "include"]
    subprocess.run([*command, source / "tests" / "driver.c", "-o", library], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return folder


def run(driver, program, *arguments):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "GPU_IS_HOST_MEMORY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


@pytest.mark.parametrize("place", ["disk", "server"])
def test_loads_to_a_gpu(driver, random_file, place):
    path, _ = random_file([(300, 700), (9, 6, 5), (4, 3, 3), (0, 4), ()])
    blocks = sorted((fixtures() / "gguf").rglob("*.gguf"))[0]
    if place == "server":
        shutil.copy(blocks, path.parent / "blocks.gguf")
        server = RangeServer(path.parent)
        path, blocks = f"{server.url}/{path.name}", f"{server.url}/blocks.gguf"
    run(driver, PROGRAM, path, blocks)


def test_small_loads_take_little_memory_of_a_gpu(driver, random_file):
    path, _ = random_file([(30, 70), (9, 6, 5), ()])
    run(driver, OF_MANY, path)


def test_slices_of_packs_to_a_gpu(driver, models):
    _, packs = models
    for compressed in ("compact", "zstd"):
        run(driver, OF_PACKS, packs["none"], packs[compressed])


def test_without_a_driver(random_file):
    import forebay

    path, _ = random_file([(3,)])
    # With a GPU in the machine, there is none of this number.
    with pytest.raises(forebay.DeviceError):
        forebay.load(path, device="cuda:99")
