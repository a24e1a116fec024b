#!/usr/bin/env python3
"""Generates text with a model of transformers that is larger than VRAM.

    examples/stream_language_model.py MODEL "Once upon a time" [--vram 4GiB] [--ram SIZE] [--tokens N]

MODEL is a folder with safetensors files, or a name on the Hugging Face Hub. Models that forebay itself knows are much faster with its own engine;
this is for all others.
"""

import argparse

import forebay.transformers
import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("prompt")
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--vram", default="4GiB", help="for weights; the computation needs more besides")
parser.add_argument("--ram", help="for weights; the rest is read from the disk for each token")
parser.add_argument("--tokens", type=int, default=30)
arguments = parser.parse_args()

options = {"device": arguments.device, "vram": arguments.vram, "ram": arguments.ram}
model = forebay.transformers.from_pretrained(arguments.model, dtype="auto", stream=options)
tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
inputs = tokenizer(arguments.prompt, return_tensors="pt").to(arguments.device)
with torch.inference_mode():
    tokens = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
counts = model.forebay_stream.statistics()
print(f"{counts.passes} passes brought {counts.loaded_bytes / 1e9:.1f} GB of weights and read {counts.read_bytes / 1e9:.1f} GB")
for plan in model.forebay_stream.plan():
    print(f"{plan.call}: {plan.seconds:.3f} s, limited by {plan.limit}")
