"""Loads a folder of safetensors files to the GPU with one of the peers, once, and prints what it took as JSON.

    python3 load.py PEER STATE FOLDER

PEER: forebay_python, safetensors, prefetch, fastsafetensors, runai, instanttensor. STATE: cold or warm, what the page cache has
of the files: some peers have a setting for each, and get the one that their documentation recommends. Everything else is their
default. Seconds run from before the files are opened to the synchronised GPU, with staging memory and device memory in them;
packages are imported and the CUDA context exists before. Needs torch and the peer's package.

If READY is the number of a socket, one byte is sent when the load can begin, and it begins when one byte has come back.
gpus.py runs forebay_share, which loads one of SHARE's parts ("0/2": the first of two).
"""

import contextlib
import json
import os
import resource
import socket
import sys
import time
import zlib

import torch
from compare import weights

# Each of these imports the peer, and returns what loads files.


def forebay_python(state):
    import forebay

    return lambda files: forebay.load(files, device="cuda:0")


def forebay_share(state):
    """A part of the tensors: one span of the files, as long as the others but for a tensor. A caller knows its tensors before."""
    import forebay

    index, count = map(int, os.environ["SHARE"].split("/"))
    tensors = forebay.list_tensors(weights(sys.argv[3]))
    total, before, chosen = sum(info.nbytes for info in tensors.values()), 0, []
    for name, info in tensors.items():
        if (before + info.nbytes / 2) * count // total == index:
            chosen.append(name)
        before += info.nbytes
    return lambda files: forebay.load(files, device="cuda:0", tensors=chosen)


def safetensors(state):
    from safetensors.torch import load_file

    return lambda files: {name: tensor for file in files for name, tensor in load_file(file, device="cuda:0").items()}


def prefetch(state, **options):
    from safetensors import safe_open

    def load(files):
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, framework="pt", device="cuda:0", **options)) for file in files]
            # All begin before the first is waited for.
            loaders = [file.prefetch() for file in opened]
            return {name: tensor for loader in loaders for name, tensor in loader}

    return load


def prefetch_pread(state):
    """The same, without mappings."""
    return prefetch(state, backend="pread")


def fastsafetensors(state, **options):
    if state == "warm":
        # Its reads pass the page cache by otherwise.
        os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    from fastsafetensors import SafeTensorsFileLoader

    def load(files):
        loader = SafeTensorsFileLoader(None, "cuda:0", nogds=True, **options)
        loader.add_filenames({0: files})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        # The tensors own their memory.
        buffers.close()
        loader.close()
        return tensors

    return load


def fastsafetensors_256m(state):
    """The same with larger bounce buffers, those of an example in its documentation."""
    return fastsafetensors(state, bbuf_size_kb=256 * 1024)


def runai(state):
    if state == "warm":
        # Its reads pass the page cache by otherwise.
        os.environ["RUNAI_STREAMER_FS_STRATEGY"] = "sync_buffered"
    from runai_model_streamer import SafetensorsStreamer

    def load(files):
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device="cuda:0")
            return dict(streamer.get_tensors())

    return load


def instanttensor(state):
    from instanttensor import BackendPolicy, safe_open

    # Its reads pass the page cache by otherwise.
    backend = BackendPolicy.BUFFERED if state == "warm" else None

    def load(files):
        with safe_open(files, framework="pt", device=0, backend=backend) as opened:
            return dict(opened.tensors())

    return load


def digest(tensors):
    """Equal for equal tensors with equal names: shows that all peers loaded the same."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.device.type == "cuda", f"{name} is on {tensor.device}"
        words = tensor.contiguous().view(-1).view(torch.int16)
        total = zlib.crc32(f"{name} {tuple(tensor.shape)} {words.sum(dtype=torch.int64).item()}".encode(), total)
    return f"{total:08x}"


def disk_bytes():
    """What this process has read of disks."""
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main():
    peer, state, folder = sys.argv[1:]
    files = weights(folder)
    load = globals()[peer](state)
    # The context, and what torch makes at the first copy.
    torch.ones(1 << 20).to("cuda:0").clone()
    torch.cuda.synchronize()
    if "READY" in os.environ:
        with socket.socket(fileno=int(os.environ["READY"])) as parent:
            parent.sendall(b"r")
            parent.recv(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    disk_before = disk_bytes()
    started = time.perf_counter()
    tensors = load(files)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    disk_after = disk_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(json.dumps({
        "tensors": len(tensors), "bytes": size, "seconds": seconds, "resident_before_bytes": before,
        "peak_resident_bytes": peak, "digest": digest(tensors), "started": started, "disk_bytes": disk_after - disk_before,
    }), flush=True)
    # Nothing is measured of what a peer does at the end, and nothing of it shall be printed.
    os._exit(0)


main()
