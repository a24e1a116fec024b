#!/usr/bin/env python3
"""Makes a picture with a pipeline of diffusers that is larger than VRAM.

    examples/stream_flux.py "a lighthouse in a storm" picture.png [--model NAME_OR_FOLDER] [--vram 8GiB] [--ram SIZE] [--steps N]

Needs diffusers and its pipeline's own packages. Models of the Hugging Face Hub are downloaded by diffusers.
"""

import argparse

import forebay.diffusers
import torch

parser = argparse.ArgumentParser()
parser.add_argument("prompt")
parser.add_argument("picture")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev")
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--vram", default="8GiB", help="for weights; the computation needs more besides")
parser.add_argument("--ram", help="for weights; the rest is read from the disk in each step")
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--steps", type=int, default=28)
arguments = parser.parse_args()

options = {"device": arguments.device, "vram": arguments.vram, "ram": arguments.ram}
pipeline = forebay.diffusers.from_pretrained(arguments.model, torch_dtype=torch.bfloat16, stream=options)
with torch.inference_mode():
    result = pipeline(arguments.prompt, height=arguments.size, width=arguments.size, num_inference_steps=arguments.steps)
result.images[0].save(arguments.picture)
for plan in pipeline.forebay_stream.plan():
    more = f"{plan.seconds_with_more_vram:.3f} s with 1 GiB more of VRAM, {plan.seconds_with_more_ram:.3f} s with 1 GiB more of RAM"
    print(f"{plan.call}: {plan.seconds:.3f} s, limited by {plan.limit}; {more}")
