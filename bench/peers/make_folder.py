"""A Hugging Face folder of the shape of a 5-billion-parameter llama, 10.8 GB of bf16 in 4 files, with random weights.

    python3 make_folder.py FOLDER [LAYERS]

LAYERS (46) scales the size; a few layers make fewer files. Needs torch and safetensors.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

FILES = 4
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3072, 8192, 24, 8, 128, 128256


def tensors(layers):
    """Names and shapes in the order of a published model."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (HIDDEN,)
        yield name + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield name + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield name + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield name + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield name + "post_attention_layernorm.weight", (HIDDEN,)
        yield name + "mlp.gate_proj.weight", (WIDTH, HIDDEN)
        yield name + "mlp.up_proj.weight", (WIDTH, HIDDEN)
        yield name + "mlp.down_proj.weight", (HIDDEN, WIDTH)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def main():
    folder = sys.argv[1]
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 46
    os.makedirs(folder, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = list(tensors(layers))
    total = sum(2 * torch.Size(shape).numel() for _, shape in shapes)
    files, size = [{}], 0
    for name, shape in shapes:
        if size >= total * len(files) / FILES and len(files) < FILES:
            files.append({})
        files[-1][name] = shape
        size += 2 * torch.Size(shape).numel()
    torch.manual_seed(1)
    index = {}
    for number, content in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        made = {key: torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.02).cpu() for key, shape in content.items()}
        save_file(made, os.path.join(folder, name), metadata={"format": "pt"})
        index.update(dict.fromkeys(content, name))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, out)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }
    with open(os.path.join(folder, "config.json"), "w") as out:
        json.dump(config, out, indent=1)
    print(f"{folder}: {total / 1e9:.2f} GB in {len(files)} files")


main()
