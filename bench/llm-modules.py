#!/usr/bin/env python3
"""Times language models of transformers whose weights are larger than the memory that they may take: forebay and others.

    bench/llm-modules.py [--model llama-8b|llama-1b|qwen3-moe] [--vram SIZE] [--prompt N] [--tokens N] [--pass-tokens N]
                         [--peers NAMES] [--peer-tokens N]

The model has the published shape (qwen3-moe: that of Qwen3-30B-A3B with 12 of its 48 layers) and random weights in BF16. Columns: seconds of
`generate` by token (the first one is that of the prompt), of a pass over N tokens (2,048), both also in multiples of the resident model, and most VRAM.
Tokens must equal those of the resident model. Peers: offload of accelerate (`accelerate`) and group offloading of diffusers with streams
(`group-leaf`). They generate few tokens, once, because some take seconds for each. Needs PyTorch with CUDA, transformers, VRAM for all weights, and
twice their RAM.
"""

import argparse
import gc
import importlib.util
import sys
import time

import forebay.torch
import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("llama-8b", "llama-1b", "qwen3-moe"), default="llama-8b")
parser.add_argument("--vram", default="4GiB")
parser.add_argument("--prompt", type=int, default=128)
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--pass-tokens", type=int, default=2048)
parser.add_argument("--peers", default="accelerate,group-leaf")
parser.add_argument("--peer-tokens", type=int, default=3)
arguments = parser.parse_args()
GIB = 1 << 30

shapes = {
    "llama-8b": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    ),
    "llama-1b": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=12, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    ),
}  # fmt: skip


def timed(call, calls):
    """Return the seconds of the last call, and its result."""
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds, result


def measure(name, more_vram=0, count=arguments.tokens, calls=4):
    torch.cuda.reset_peak_memory_stats()
    generate = lambda: model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)  # noqa: E731
    generated, tokens = timed(generate, min(calls, 2))
    generated /= count
    passed, _ = timed(lambda: model(long, logits_to_keep=1), calls)
    first = reference or (tokens, generated, passed)
    same = torch.equal(tokens, first[0][:, : tokens.shape[1]])
    vram = (torch.cuda.max_memory_allocated() + more_vram) / GIB
    cells = [name, f"{generated:.4f}", f"{generated / first[1]:.2f}", f"{passed:.3f}", f"{passed / first[2]:.2f}", f"{vram:.1f}"]
    print("| " + " | ".join([*cells, "" if same else "TOKENS DIFFER"]) + " |", flush=True)
    return first, same


torch.manual_seed(1)
reference, right = None, True
with torch.inference_mode():
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(shapes[arguments.model], dtype=torch.bfloat16).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(1000, (1, arguments.prompt), device="cuda")
    long = torch.randint(1000, (1, arguments.pass_tokens), device="cuda")
    weights = sum(it.numel() * it.element_size() for it in model.parameters())
    print(f"{torch.cuda.get_device_name()}, {arguments.model}, {weights / GIB:.1f} GiB of weights, {arguments.prompt} + {arguments.tokens} tokens; ", end="")
    print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}")
    print(f"| | a token, s | of resident | pass of {arguments.pass_tokens} tokens, s | of resident | VRAM, GiB | |\n| --- | --- | --- | --- | --- | --- | --- |")
    reference, _ = measure("resident")
    model.to("cpu")
    torch.cuda.empty_cache()
    with forebay.torch.stream(model, vram=arguments.vram) as stream:
        _, right = measure(f"forebay, {arguments.vram}", stream.statistics().device_bytes)
        print("|", " | ".join(str(plan) for plan in stream.plan()), "|")
    gc.collect()
    torch.cuda.empty_cache()
    for peer in filter(None, arguments.peers.split(",")):
        package = "accelerate" if peer == "accelerate" else "diffusers"
        if importlib.util.find_spec(package) is None:
            print(f"| {peer} | {package} is not installed here |")
            continue
        try:
            if peer == "accelerate":
                import accelerate

                accelerate.cpu_offload(model, execution_device="cuda:0")
                measure(peer, count=arguments.peer_tokens, calls=1)
                accelerate.hooks.remove_hook_from_module(model, recurse=True)
            else:
                from diffusers.hooks import apply_group_offloading

                options = {"onload_device": torch.device("cuda"), "offload_device": torch.device("cpu"), "use_stream": True}
                apply_group_offloading(model, offload_type="leaf_level", **options)
                measure(peer, count=arguments.peer_tokens, calls=1)
        except Exception as error:  # noqa: BLE001
            print(f"| {peer} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
print("tokens of forebay are equal" if right else "TOKENS OF FOREBAY DIFFER")
sys.exit(0 if right else 1)
