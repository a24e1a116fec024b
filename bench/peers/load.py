"""Loads a folder of safetensors files to the GPU with one of the peers, once, and prints what it took as JSON.

    python3 load.py PEER FOLDER        PEER: safetensors, prefetch, fastsafetensors, runai, instanttensor

Seconds run from opening the files to the synchronised GPU; the CUDA context exists before. Needs torch and the peer's package.
"""

import contextlib
import glob
import json
import os
import resource
import sys
import time

import torch


def safetensors(files):
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file, device="cuda:0").items()}


def prefetch(files):
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt", device="cuda:0")) for file in files]
        # All begin before the first is waited for.
        loaders = [file.prefetch() for file in opened]
        return {name: tensor for loader in loaders for name, tensor in loader}


def fastsafetensors(files):
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, "cuda:0", nogds=True, max_threads=16)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def runai(files):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        return {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}


def instanttensor(files):
    from instanttensor import safe_open

    with safe_open(files, framework="pt", device=0) as opened:
        return dict(opened.tensors())


def main():
    peer, folder = sys.argv[1:]
    files = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    torch.zeros(1, device="cuda:0")
    torch.cuda.synchronize()
    started = time.perf_counter()
    tensors = globals()[peer](files)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(json.dumps({
        "peer": peer, "tensors": len(tensors), "bytes": size, "seconds": seconds, "bytes_per_second": size / seconds,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))


main()
