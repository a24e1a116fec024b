#!/usr/bin/env python3
"""Writes two tiny models with which every client can be checked, without packages.

    bench/client-models.py FOLDER [FIXTURES]

FOLDER/caller answers every conversation with the same call of the tool `look`, in the form of Qwen3. So clients that cannot force a
call, such as Ollama's, are checked with calls, too. FOLDER/random is a mixture of experts with random weights and the chat template
of Qwen3: it calls a tool only where a request forces it. FIXTURES is the folder `fixtures` beside this one unless given.

The caller's hidden state is the last token: its layer adds nothing. The output projection leads from each part of the call to the
next one, and from any other token to the first.
"""

import json
import pathlib
import shutil
import struct
import sys

folder = pathlib.Path(sys.argv[1])
fixtures = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(__file__).parent.parent / "fixtures"
source = fixtures / "models/qwen3_moe"
template = fixtures / "templates/Qwen-Qwen3-0.6B.jinja"

HIDDEN, CONTEXT, INNER = 16, 2048, 32
PARTS = ["<tool_call>", '\n{"name": "look", "arguments": ', '{"legs"', ": 4}", "}\n", "</tool_call>"]


def random_model(path):
    path.mkdir(parents=True, exist_ok=True)
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for file in names + [file.name for file in source.glob("model*")]:
        shutil.copy(source / file, path / file)
    shutil.copy(template, path / "chat_template.jinja")


def matrix(rows, columns, ones=()):
    values = [0.0] * (rows * columns)
    for row, column in ones:
        values[row * columns + column] = 1.0
    return [rows, columns], values


def save(path, tensors):
    header, data = {}, bytearray()
    for name, (shape, values) in tensors.items():
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def caller(path):
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    first = max(token["id"] for token in added) + 1
    end = next(token["id"] for token in added if token["content"] == "<|im_end|>")
    added += [{"id": first + at, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": False} for at, text in enumerate(PARTS)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ["tokenizer_config.json", "generation_config.json"]:
        shutil.copy(source / file, path / file)
    shutil.copy(template, path / "chat_template.jinja")
    vocabulary = first + len(PARTS)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HIDDEN // 2,
              "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": vocabulary,
              "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
              "bos_token_id": None, "eos_token_id": end}
    (path / "config.json").write_text(json.dumps(config))
    # Direction 0 is any other token, direction 1 + i the part i.
    after = [(token, 0) for token in range(first)] + [(first + at, 1 + at) for at in range(len(PARTS))]
    leads = [(first + at, at) for at in range(len(PARTS))] + [(end, len(PARTS))]
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN, after),
        "lm_head.weight": matrix(vocabulary, HIDDEN, leads),
        # Large, so that the likeliest token is drawn at any temperature.
        "model.norm.weight": ([HIDDEN], [20.0] * HIDDEN),
        layer + "input_layernorm.weight": ([HIDDEN], [1.0] * HIDDEN),
        layer + "post_attention_layernorm.weight": ([HIDDEN], [1.0] * HIDDEN),
        layer + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        layer + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
        layer + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
    }
    tensors |= {f"{layer}self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN) for name in "qkvo"}
    save(path / "model.safetensors", tensors)


random_model(folder / "random")
caller(folder / "caller")
print(folder)
