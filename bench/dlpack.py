"""Loads safetensors with libforebay and hands the tensors to PyTorch by DLPack, without a copy; compares them with what
safetensors.torch.load_file gives.

    python3 dlpack.py LIBRARY [FOLDER ...] [--device cuda:0]

LIBRARY is libforebay.so, FOLDER any folder of safetensors files. A folder with a tensor of every type, some at odd places,
is made and compared besides. Needs torch and safetensors, and nothing to be built: forebay_load.h by ctypes.
Exit status 1 if anything differs.
"""

import argparse
import ctypes
import gc
import glob
import os
import sys
import tempfile
import threading
import time
from ctypes import byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

PROGRESS = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64)
CPU, CUDA = 1, 2
# Places of the deleters in DLManagedTensorVersioned and DLManagedTensor.
DELETER = {b"dltensor_versioned": 16, b"dltensor": 56}


class Options(ctypes.Structure):
    _fields_ = [("struct_bytes", c_uint64), ("engine", c_uint32), ("verify", c_uint32), ("read_back", c_uint32),
                ("reserved", c_uint32), ("vram_bytes", c_uint64), ("pinned_bytes", c_uint64), ("progress", PROGRESS),
                ("progress_user", c_void_p)]


class TensorInfo(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_char_p), ("shape", ctypes.POINTER(c_int64)), ("data", c_void_p),
                ("bytes", c_uint64), ("stride_bytes", c_uint64), ("file_offset", c_uint64),
                ("file_stride_bytes", c_uint64), ("file", c_uint32), ("rank", c_int32), ("flags", c_uint32),
                ("ggml_type", c_int32), ("dlpack_code", c_uint8), ("dlpack_bits", c_uint8), ("dlpack_lanes", c_uint16),
                ("reserved", c_uint32)]


class Statistics(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("tensors", "files", "bytes", "read_bytes", "cached_bytes", "memory_bytes",
                                              "pinned_bytes")]
    _fields_ += [(name, c_double) for name in ("seconds", "setup_seconds", "bytes_per_second", "cpu_seconds")]


class Forebay:
    """The library."""

    def __init__(self, path):
        # Calls without the interpreter's lock: a load does not stop other threads.
        self.c = ctypes.CDLL(path)
        weights, status = c_uint64, c_int32
        for name, *arguments in [
            ("last_error", c_uint64, c_char_p, c_size_t),
            ("load_options_init", c_void_p, c_size_t),
            ("load", c_char_p, c_char_p, c_void_p, c_void_p),
            ("weights_count", weights, c_void_p),
            ("weights_tensor", weights, c_size_t, c_void_p, c_size_t),
            ("weights_statistics", weights, c_void_p, c_size_t),
            ("weights_describe", weights, c_char_p, c_size_t),
            ("weights_free", weights),
            ("tensor_dlpack", weights, c_size_t, c_void_p),
            ("tensor_dlpack_unversioned", weights, c_size_t, c_void_p),
        ]:
            function = getattr(self.c, f"forebay_{name}")
            function.restype, function.argtypes = status, arguments

    def call(self, name, *arguments):
        status = getattr(self.c, f"forebay_{name}")(*arguments)
        if status != 0:
            words = ctypes.create_string_buffer(1024)
            self.c.forebay_last_error(0, words, len(words))
            raise RuntimeError(words.value.decode())


class Weights:
    """All weights of a path. Tensors that were handed on keep their memory when this is gone."""

    def __init__(self, forebay, path, device, progress=None, pinned_bytes=0):
        self.forebay, self.number = forebay, c_uint64()
        options = Options()
        forebay.call("load_options_init", byref(options), ctypes.sizeof(options))
        options.pinned_bytes = pinned_bytes
        options.progress = PROGRESS(progress or (lambda user, done, total: 0))
        forebay.call("load", os.fsencode(path), device.encode(), byref(options), byref(self.number))
        self.device = (CPU, 0) if device == "cpu" else (CUDA, int(device.partition(":")[2] or 0))

    def __iter__(self):
        count = c_size_t()
        self.forebay.call("weights_count", self.number, byref(count))
        for index in range(count.value):
            info = TensorInfo()
            self.forebay.call("weights_tensor", self.number, index, byref(info), ctypes.sizeof(info))
            yield info.name.decode(), Tensor(self, index, info)

    def statistics(self):
        statistics = Statistics()
        self.forebay.call("weights_statistics", self.number, byref(statistics), ctypes.sizeof(statistics))
        return statistics

    def describe(self):
        text = ctypes.create_string_buffer(256)
        self.forebay.call("weights_describe", self.number, text, len(text))
        return text.value.decode()

    def free(self):
        self.forebay.call("weights_free", self.number)


class Tensor:
    """What torch.from_dlpack and others take."""

    def __init__(self, weights, index, info):
        self.weights, self.index, self.info = weights, index, info

    def __dlpack_device__(self):
        return self.weights.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        # Nothing is queued on any stream: loads are complete.
        if copy or dl_device not in (None, self.weights.device):
            raise BufferError("there are no copies here")
        return self.capsule(versioned=max_version is not None and max_version[0] >= 1)

    def capsule(self, versioned):
        managed = c_void_p()
        function = "tensor_dlpack" if versioned else "tensor_dlpack_unversioned"
        self.weights.forebay.call(function, self.weights.number, self.index, byref(managed))
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return NEW_CAPSULE(managed, name, None)


def python(name, result, *arguments):
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = result, arguments
    return function


# No destructor: it may be called while an exception is on its way, and Python code cannot leave that as it found it. A
# package has these ten lines in C; here, a tensor that a consumer refuses stays.
NEW_CAPSULE = python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
IS_VALID = python("PyCapsule_IsValid", c_int, ctypes.py_object, c_char_p)
POINTER_OF = python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)


def delete(capsule):
    """Deletes the tensor of a capsule that no consumer has taken: consumers rename capsules."""
    for name, place in DELETER.items():
        if IS_VALID(capsule, name):
            managed = POINTER_OF(capsule, name)
            ctypes.CFUNCTYPE(None, c_void_p)(c_void_p.from_address(managed + place).value)(managed)


def make_folder(folder):
    import torch
    from safetensors.torch import save_file

    names = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "int16",
             "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
    torch.manual_seed(2)
    for number in range(2):
        tensors = {}
        for name in names:
            dtype = getattr(torch, name, None)
            if dtype is None:
                continue
            for shape in [(), (1,), (3, 5, 7), (333, 1001)]:
                size = torch.empty(shape, dtype=dtype).nbytes
                noise = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8)
                tensors[f"{number}.{name}.{'x'.join(map(str, shape))}"] = noise.view(dtype).reshape(shape)
        save_file(tensors, os.path.join(folder, f"part-{number}.safetensors"))


def as_bytes(tensor):
    import torch

    # NaNs differ from themselves.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def compare(forebay, folder, device):
    """Every tensor of a folder; then frees in both orders."""
    import torch
    from safetensors.torch import load_file

    started = time.perf_counter()
    weights = Weights(forebay, folder, device)
    seconds = time.perf_counter() - started
    handed = {}
    for index, (name, tensor) in enumerate(weights):
        # A capsule that no consumer takes, one of the old kind, one of the new kind, and the protocol.
        delete(tensor.capsule(versioned=index % 2 == 0))
        taken = [tensor.capsule(False), tensor.capsule(True), tensor][index % 3]
        handed[name] = torch.from_dlpack(taken)
        assert handed[name].data_ptr() == tensor.info.data, f"{name} was copied"
        if device != "cpu":
            assert tensor.info.data % 256 == 0, f"{name} lies at {tensor.info.data:#x}"
    statistics = weights.statistics()
    line = (f"{folder}: {len(handed)} tensors, {statistics.bytes * 1e-9:.3f} GB to {device} in {statistics.seconds:.3f} s"
            f" ({statistics.bytes_per_second * 1e-9:.1f} GB/s), {seconds:.3f} s with everything; {weights.describe()}")
    # The tensors keep the memory.
    weights.free()
    del weights, tensor, taken
    gc.collect()
    started, expected = time.perf_counter(), {}
    for file in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        expected |= load_file(file, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"{line}; load_file after it: {time.perf_counter() - started:.3f} s")
    assert sorted(handed) == sorted(expected), "other tensors"
    for name, wanted in expected.items():
        found = handed[name]
        assert (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device), name
        assert found.is_contiguous(), name
        assert torch.equal(as_bytes(found), as_bytes(wanted)), f"{name} differs"
    # The last owner is a tensor that another thread deletes.
    last = [handed.popitem()[1]]
    handed.clear()
    thread = threading.Thread(target=last.clear)
    thread.start()
    thread.join()


def check_given_back(forebay, folder, device):
    """Memory is freed in either order of release, and after a load that was stopped."""
    import torch

    def used():
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    torch.cuda.empty_cache()
    # Torch takes GPU memory in pieces of its own: the piece that the sums below are in stays in use.
    total = torch.zeros(1, dtype=torch.float64, device=device)
    before = used()
    for _ in range(3):
        weights = Weights(forebay, folder, device, pinned_bytes=4 << 20)
        assert used() > before, "no memory is used"
        assert weights.statistics().pinned_bytes <= 4 << 20
        tensors = [torch.from_dlpack(tensor) for _, tensor in weights]
        # Queued work may still read what is given back meanwhile.
        total = sum(tensor.reshape(-1)[:1].to(torch.float64, copy=True) for tensor in tensors if tensor.dtype == torch.float32)
        weights.free()
        assert used() > before, "tensors lost their memory"
        tensors.clear()
        torch.cuda.synchronize()
        assert used() <= before, f"{used() - before} bytes stay in use"
    try:
        Weights(forebay, folder, device, progress=lambda user, done, total: 1)
        raise AssertionError("a load went on that was to end")
    except RuntimeError as error:
        assert "interrupted" in str(error), error
    assert used() <= before, f"{used() - before} bytes stay in use after a load that was ended"
    return total


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("shared_object", metavar="LIBRARY")
    arguments.add_argument("folders", nargs="*")
    arguments.add_argument("--device", default="cuda:0")
    given = arguments.parse_args()
    import torch

    forebay = Forebay(os.path.abspath(given.shared_object))
    if given.device != "cpu":
        torch.ones(1, device=given.device)
    with tempfile.TemporaryDirectory() as made:
        make_folder(made)
        for folder in [made, *given.folders]:
            compare(forebay, folder, given.device)
            if given.device != "cpu":
                check_given_back(forebay, folder, given.device)
    print("equal to load_file, and all memory given back")


if __name__ == "__main__":
    sys.exit(main())
