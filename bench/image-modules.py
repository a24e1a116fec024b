#!/usr/bin/env python3
"""Times steps of the transformer of an image model whose weights are larger than the memory that they may take: forebay and others.

    bench/image-modules.py [--model flux|qwen] [--pixels N] [--vram SIZE ...] [--steps N] [--peers NAMES] [--layers N]

The model is that of Flux.1-dev (12 billion weights) or Qwen-Image (20 billion) in BF16, made by diffusers from its published configuration, with
random weights of the spread that trained ones have. Columns: seconds of a step (the median), the same with all weights in VRAM, the limit (what
takes longer: the step itself, or the coded weights that it brings over the bus, at the rate of copies from pinned memory), most VRAM that
PyTorch and forebay have in a step, RAM of the weights, and pinned RAM. Outputs must equal those of the resident model.

Needs PyTorch with CUDA and diffusers, VRAM for all weights, and twice their RAM. Peers, in turn, if they are installed:
    group-leaf, group-block   group offloading of diffusers with streams, of single layers or of blocks
    sequential                offload of accelerate
    dfloat11                  DFloat11 with CPU offload. Its encoder takes hours for such a model, so this script writes the same format itself,
                              with its code tables; its outputs are checked like all others.
"""

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
import types

import diffusers
import forebay.torch
import torch
from gpu_rates import bus_rate

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("flux", "qwen"), default="flux")
parser.add_argument("--pixels", type=int, default=1024)
parser.add_argument("--vram", nargs="+", default=["8GiB"])
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--peers", default="group-leaf,group-block,sequential,dfloat11")
parser.add_argument("--layers", type=int, help="layers of each kind, instead of all")
arguments = parser.parse_args()
GIB = 1 << 30


def configured():
    if arguments.model == "flux":
        layers = {"num_layers": arguments.layers, "num_single_layers": arguments.layers} if arguments.layers else {}
        return diffusers.FluxTransformer2DModel, {"guidance_embeds": True, **layers}
    return diffusers.QwenImageTransformer2DModel, {"num_layers": arguments.layers} if arguments.layers else {}


def inputs(model):
    """Return the arguments of a step for a square picture and 512 tokens of text."""
    side, text = arguments.pixels // 16, 512
    config = model.config
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    given = {
        "hidden_states": random(1, side * side, config.in_channels),
        "encoder_hidden_states": random(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5], device="cuda", dtype=torch.bfloat16),
        "return_dict": False,
    }
    if arguments.model == "flux":
        given["pooled_projections"] = random(1, config.pooled_projection_dim)
        given["guidance"] = torch.tensor([3.5], device="cuda", dtype=torch.bfloat16)
        given["txt_ids"] = torch.zeros(text, 3, device="cuda")
        rows = torch.arange(side * side, device="cuda")
        given["img_ids"] = torch.stack([torch.zeros_like(rows), rows // side, rows % side], 1).float()
    else:
        given["encoder_hidden_states_mask"] = torch.ones(1, text, device="cuda", dtype=torch.bool)
        given["img_shapes"] = [[(1, side, side)]]
        if "txt_seq_lens" in model.forward.__code__.co_varnames:
            given["txt_seq_lens"] = [text]
    return given


def timed(model, given, warm=2):
    """Return the median seconds of a step, the output, and the most bytes of VRAM."""
    times = []
    for step in range(arguments.steps + warm):
        torch.cuda.synchronize()
        if step == warm:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = model(**given)[0]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm:]), result, torch.cuda.max_memory_allocated()


def pinned_bytes():
    """Return the bytes of pinned memory that PyTorch has given out."""
    return torch.cuda.host_memory_stats().get("active_bytes.current", 0)


def dfloat11(model):
    """Replace the weights of linear layers by DFloat11's, in RAM, block by block as its models for diffusers do."""
    if importlib.util.find_spec("pkg_resources") is None:
        # It only asks for the path of a file in its folder.
        stub = types.ModuleType("pkg_resources")
        stub.resource_filename = lambda package, name: os.path.join(os.path.dirname(importlib.util.find_spec(package).origin), name)
        sys.modules["pkg_resources"] = stub
    from dfloat11 import dfloat11 as df
    from dfloat11 import dfloat11_utils as tools

    blocks = [(name, it) for name, it in model.named_modules() if name.rpartition(".")[0].endswith("transformer_blocks")]
    for _, block in blocks:
        linear = [it for it in block.modules() if isinstance(it, torch.nn.Linear)]
        flat = torch.cat([it.weight.detach().flatten() for it in linear]).cuda().view(torch.int16)
        exponents = ((flat >> 7) & 255).to(torch.uint8)
        rest = ((flat >> 8) & 0x80 | (flat & 0x7F)).to(torch.uint8)
        values, counts = torch.unique(exponents, return_counts=True)
        codec, _, table = tools.get_32bit_codec(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        with open(os.devnull, "w") as nowhere:
            kept, sys.stdout = sys.stdout, nowhere
            try:
                luts = tools.get_luts(table)
            finally:
                sys.stdout = kept
        encoded, gaps, positions = encoded_exponents(exponents, table, df.bytes_per_thread, df.threads_per_block[0])
        for name, it in (("luts", luts), ("output_positions", positions.view(torch.uint8)), ("gaps", gaps)):
            block.register_buffer(name, it.cuda())
        block.offloaded_tensors = {"encoded_exponent": encoded.cpu().pin_memory(), "sign_mantissa": rest.cpu().pin_memory()}
        sizes = torch.tensor([it.weight.numel() for it in linear])
        block.split_positions, block.weight_injection_modules = torch.cumsum(sizes, 0)[:-1].tolist(), linear
        wide = positions.to(torch.int64)
        block.shared_mem_size = df.threads_per_block[0] * 4 + 4 + int((wide[1:] - wide[:-1]).max()) * 2
        block.register_forward_pre_hook(df.get_hook(df.threads_per_block, df.bytes_per_thread))
        for it in linear:
            del it.weight
        del flat, exponents, rest
    return model.to("cuda")


def encoded_exponents(exponents, table, bytes_per_thread, threads):
    """Return Huffman codes as DFloat11's encoder writes them, the first bit of each thread, and the first element of each block of them."""
    lengths, codes = torch.zeros(256, dtype=torch.int64, device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
    for key, (bits, code) in table.items():
        if isinstance(key, int):
            lengths[key], codes[key] = bits, code
    size = int(lengths[exponents[: 1 << 20].long()].float().mean() * exponents.numel() / 8 * 1.1) + (64 << 20)
    out = torch.zeros(size, dtype=torch.int32, device="cuda")
    thread, block = 8 * bytes_per_thread, 8 * bytes_per_thread * threads
    threads_begin = torch.zeros(size * 8 // thread + 2, dtype=torch.int64, device="cuda")
    blocks_begin = torch.zeros(size * 8 // block + 2, dtype=torch.int64, device="cuda")
    total, last = 0, {thread: -1, block: -1}
    for at in range(0, exponents.numel(), 1 << 25):
        symbols = exponents[at : at + (1 << 25)].long()
        length = lengths[symbols]
        ends = torch.cumsum(length, 0) + total
        begins = ends - length
        window = codes[symbols] << (40 - length - begins % 8)
        for byte in range(5):
            out.index_add_(0, begins // 8 + byte, ((window >> (32 - 8 * byte)) & 255).int())
        # Which code is the first that begins in the bits of a thread, and which element in those of a block of threads.
        for unit, into in ((thread, threads_begin), (block, blocks_begin)):
            number = begins // unit
            new = number != torch.cat([torch.tensor([last[unit]], device="cuda"), number[:-1]])
            into[number[new]] = (begins - number * unit)[new] if unit == thread else torch.nonzero(new).flatten() + at
            last[unit] = int(number[-1])
        total = int(ends[-1])
    encoded = out[: -(-total // 8)].to(torch.uint8)
    blocks = -(-encoded.numel() // (threads * bytes_per_thread))
    gaps = threads_begin[: threads * blocks]
    bits = (gaps[:, None] >> torch.arange(4, -1, -1, device="cuda")) & 1
    bits = torch.nn.functional.pad(bits.flatten(), (0, -bits.numel() % 8)).view(-1, 8)
    packed = (bits << torch.arange(7, -1, -1, device="cuda")).sum(1).to(torch.uint8)
    positions = torch.cat([blocks_begin[: -(-total // block)], torch.tensor([exponents.numel()], device="cuda")])
    return encoded, packed, positions.to(torch.uint32).cpu()


def row(name, seconds, limit, vram, ram, pinned, note=""):
    cells = [name, f"{seconds:.3f}", f"{seconds / resident:.2f}", "" if limit is None else f"{seconds / limit:.2f}"]
    print("| " + " | ".join([*cells, *(f"{it / GIB:.1f}" for it in (vram, ram, pinned)), note]) + " |", flush=True)


torch.manual_seed(1)
wrong = 0
with torch.inference_mode():
    kind, options = configured()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = kind(**options).eval()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Wide layers have small weights, and outputs stay small.
            parameter.normal_(0, 0.5 / parameter.shape[1] ** 0.5)
    given = inputs(model)
    weights = sum(it.numel() * it.element_size() for it in model.parameters())
    resident, expected, vram = timed(model, given)
    rate = bus_rate()
    print(f"{torch.cuda.get_device_name()}, {kind.__name__}, {weights / GIB:.1f} GiB of weights, {arguments.pixels} x {arguments.pixels}; ", end="")
    print(f"copies from pinned memory {rate / 1e9:.1f} GB/s; PyTorch {torch.__version__}, diffusers {diffusers.__version__}")
    print("| | seconds | of resident | of the limit | VRAM, GiB | RAM, GiB | pinned, GiB | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    row("resident", resident, None, vram, 0, 0)
    model.to("cpu")
    torch.cuda.empty_cache()
    for size in arguments.vram:
        began = time.perf_counter()
        stream = forebay.torch.stream(model, vram=size)
        prepared = time.perf_counter() - began
        # After the third step, other weights may stay in VRAM.
        seconds, result, vram = timed(model, given, warm=5)
        wrong += not torch.equal(result, expected)
        before = stream.statistics()
        for _ in range(4):
            model(**given)
        torch.cuda.synchronize()
        counts = stream.statistics()
        coded = (counts.loaded_bytes - before.loaded_bytes) / 4 * counts.ram_bytes / counts.weight_bytes
        [plan] = stream.plan()
        limit = max(resident, coded / rate)
        note = f"prepared in {prepared:.0f} s; brings {coded / 1e9:.1f} GB; plan {plan.seconds:.3f} ({plan.limit})"
        row(f"forebay, {size}", seconds, limit, vram + counts.device_bytes, counts.ram_bytes, counts.pinned_bytes, note)
        stream.close()
        gc.collect()
        torch.cuda.empty_cache()
    for peer in filter(None, arguments.peers.split(",")):
        needs = {"sequential": "accelerate", "dfloat11": "dfloat11"}.get(peer, "diffusers")
        if importlib.util.find_spec(needs) is None:
            print(f"| {peer} | {needs} is not installed here |")
            continue
        try:
            if peer.startswith("group"):
                level = {"offload_type": "leaf_level"} if peer == "group-leaf" else {"offload_type": "block_level", "num_blocks_per_group": 1}
                model.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), use_stream=True, **level)
            elif peer == "sequential":
                import accelerate

                accelerate.cpu_offload(model, execution_device="cuda:0")
            else:
                dfloat11(model)
            arguments.steps = 2 if peer == "sequential" else arguments.steps
            seconds, result, vram = timed(model, given, warm=1 if peer == "sequential" else 2)
            equal = torch.equal(result, expected)
            row(peer, seconds, None, vram, weights, pinned_bytes(), "" if equal else "OUTPUT DIFFERS")
        except Exception as error:  # noqa: BLE001
            print(f"| {peer} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
        # Hooks of one are no part of the next.
        if peer.startswith("group"):
            model._diffusers_hook.remove_hook("group_offloading", recurse=True)
        elif peer == "sequential":
            accelerate.hooks.remove_hook_from_module(model, recurse=True)
        if peer != "dfloat11":
            model.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()
        # Else the pinned memory of one peer would be that of the next.
        getattr(torch._C, "_host_emptyCache", lambda: None)()
print("outputs of forebay are equal" if not wrong else f"{wrong} OUTPUTS OF FOREBAY DIFFER")
sys.exit(1 if wrong else 0)
