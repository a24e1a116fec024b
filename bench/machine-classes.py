#!/usr/bin/env python3
"""Prints the tables of README.md and docs/plan.md: rates that `forebay plan` predicts for known models on typical PCs.

    bench/machine-classes.py [--forebay PROGRAM] [--short]

Nothing is measured. `bench/machine-classes.json` is a machine profile with the usual rates of a PC: dual-channel memory, PCIe 4.0 x16, an
NVMe disk, 8 cores. The rates of the GPU are those of a class: `CLASSES` names the memory bandwidth and the multiprocessors, and kernels
have the share of that bandwidth that they have in the profile. The program plans for each class with this VRAM and RAM:

- VRAM: 1 GiB less than the card has, which the desktop and other programs use.
- RAM for weights: three quarters of what the machine has, as `run` takes it by default.

A cell has tokens per second of one answer, and where the weights are: V in VRAM, R in VRAM and RAM, S also on the SSD, C on the CPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

PROFILE = pathlib.Path(__file__).with_suffix(".json")
GIB = 1 << 30

# VRAM in GiB: bandwidth of its memory in GB/s, multiprocessors.
CLASSES = {8: (300, 24), 12: (500, 46), 16: (700, 66), 24: (1000, 128)}
RAM = (16, 32, 64)
# Classes of the table in README.md.
SHORT = ((8, 16), (8, 32), (12, 32), (16, 32), (16, 64), (24, 64))

# Models that the table in README.md leaves out.
LEFT_OUT = ("qwen3.6-35b-a3b",)

# Names of `forebay plan --shape`, and names of the models.
MODELS = {
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3moe-30b": "Qwen3-30B-A3B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "qwen3-next-80b": "Qwen3-Next-80B-A3B",
    "gpt-oss-120b": "gpt-oss-120b",
    "glm-4.5-air": "GLM-4.5-Air",
    "llama-70b": "Llama 3 70B (dense)",
}


def profile_of(vram: int) -> dict:
    """Return the profile with a GPU of a class."""
    profile = json.loads(PROFILE.read_text())
    gpu = profile["gpu"]
    bandwidth, multiprocessors = CLASSES[vram]
    factor = bandwidth * 1e9 / gpu["memory_read_bytes_per_second"]
    for name in ("memory_read_bytes_per_second", "memory_copy_bytes_per_second"):
        gpu[name] *= factor
    for kernel in gpu["kernels"]:
        kernel["bytes_per_second"] *= factor
    gpu["name"] = f"a GPU with {vram} GB"
    gpu["memory_bytes"] = vram * GIB
    gpu["multiprocessors"] = multiprocessors
    return profile


def planned(forebay: str, profile: pathlib.Path, shape: str, vram: int, ram: int) -> dict | None:
    """Return the plan, or None if the model does not run on this machine."""
    command = [forebay, "plan", "--shape", shape, "--profile", str(profile), "--json"]
    command += ["--vram", f"{vram - 1}GiB", "--ram", f"{ram * 3 // 4}GiB"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode == 0:
        return json.loads(ran.stdout)
    if "too small" in ran.stderr or "does not fit" in ran.stderr:
        return None
    sys.exit(f"{' '.join(command)}: {ran.stderr}")


def place(plan: dict) -> str:
    """Return the letter of the place of the weights."""
    generate = plan["plan"]["prediction"]["generate"]
    seconds = dict(generate["costs"])
    if plan["plan"]["device"] == "cpu":
        return "C"
    if seconds.get("disk", 0) > 0:
        return "S"
    return "R" if seconds.get("pcie", 0) > 0 or seconds.get("cpu", 0) > 0 else "V"


def cell(plan: dict | None) -> str:
    if plan is None:
        return "–"
    rate = plan["plan"]["prediction"]["generate"]["tokens_per_second"]
    if rate is None:
        return "?"
    # Two digits, as a prediction has no more.
    shown = f"{float(f'{rate:.2g}'):.0f}" if rate >= 9.95 else f"{rate:.1f}"
    return f"{shown} {place(plan)}"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints predicted rates of models on typical PCs as a Markdown table.")
    parser.add_argument("--forebay", default="forebay", help="the program (forebay)")
    parser.add_argument("--short", action="store_true", help="print only the classes of README.md")
    given = parser.parse_args()
    classes = SHORT if given.short else [(vram, ram) for vram in CLASSES for ram in RAM]
    shapes = [shape for shape in MODELS if not given.short or shape not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as folder:
        profiles = {}
        for vram in CLASSES:
            profiles[vram] = pathlib.Path(folder) / f"{vram}.json"
            profiles[vram].write_text(json.dumps(profile_of(vram)))
        plans = {
            shape: [planned(given.forebay, profiles[vram], shape, vram, ram) for vram, ram in classes] for shape in shapes
        }
    size = {shape: next(plan["model"]["weights_bytes"] for plan in of if plan) for shape, of in plans.items()}
    if given.short:
        print(row(["model", "weights", *(f"{vram} + {ram} GB" for vram, ram in classes)]))
        print(row(["---"] * (2 + len(classes))))
        for shape in shapes:
            print(row([MODELS[shape], f"{size[shape] / 1e9:.0f} GB", *map(cell, plans[shape])]))
    else:
        print(row(["VRAM + RAM", *(f"{name}, {size[shape] / 1e9:.0f} GB" for shape, name in MODELS.items())]))
        print(row(["---"] * (1 + len(MODELS))))
        for at, (vram, ram) in enumerate(classes):
            print(row([f"{vram} + {ram} GB", *(cell(plans[shape][at]) for shape in MODELS)]))


if __name__ == "__main__":
    main()
