#!/usr/bin/env bash
# forebay against llama.cpp on a GPU that holds the whole model: alternating runs, ratios of one sitting.
#
#   bench/vs-llama-gpu.sh LLAMA_BENCH MODEL...
#
# LLAMA_BENCH is the llama-bench program, built with CUDA. MODEL are GGUF files.
# Rows: a prompt of PROMPT (512) tokens; GENERATE (128) tokens; and as many after DEPTH (16384) tokens (0 leaves this row out).
# Each row has PAIRS (3) runs of each program, every second pair in reverse order. A run is the median of REPEAT (3) measurements.
# GPU=N chooses the GPU (0).
# Needs python3. FOREBAY names another forebay program. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3

llama_bench=$1
shift
pairs=${PAIRS:-3} repeat=${REPEAT:-3} prompt=${PROMPT:-512} generate=${GENERATE:-128} depth=${DEPTH:-16384} gpu=${GPU:-0}
runs=$(mktemp)
trap 'rm -f "$runs"' EXIT

# run_forebay MODEL PAIR: all rows.
run_forebay() {
    local at behind
    for at in 0 "$depth"; do
        behind=$prompt
        [ "$at" = 0 ] || behind=0
        "$FOREBAY" bench "$1" --device "cuda:$gpu" --prompt-tokens "$behind" --gen-tokens "$generate" --depth "$at" \
            --repeat "$repeat" --json | python3 -c '
import json, sys
model, pair, depth = sys.argv[1:]
run = json.load(sys.stdin)
for part in ("prompt", "generate"):
    if run[part]:
        rate = run[part]["tokens_per_second_median"]
        print(f"{model}\t{part} @{depth}\tforebay\t{pair}\t{rate}")
' "$1" "$2" "$at" >>"$runs"
        [ "$depth" != 0 ] || break
    done
}

run_llama() {
    local at behind
    for at in 0 "$depth"; do
        behind=$prompt
        [ "$at" = 0 ] || behind=0
        CUDA_VISIBLE_DEVICES=$gpu "$llama_bench" -m "$1" -ngl 99 -fa 1 -p "$behind" -n "$generate" -d "$at" -r "$repeat" \
            -o json 2>/dev/null | python3 -c '
import json, statistics, sys
model, pair, depth = sys.argv[1:]
for run in json.load(sys.stdin):
    part = "prompt" if run["n_gen"] == 0 else "generate"
    rate = statistics.median(run["samples_ts"])
    print(f"{model}\t{part} @{depth}\tllama.cpp\t{pair}\t{rate}")
' "$1" "$2" "$at" >>"$runs"
        [ "$depth" != 0 ] || break
    done
}

for model in "$@"; do
    for ((pair = 0; pair < pairs; pair++)); do
        echo "$model: pair $((pair + 1)) of $pairs" >&2
        run_pair "$pair" "$model" "$pair"
    done
done

python3 - "$runs" "$prompt" "$generate" <<'PYTHON'
import collections, os, statistics, sys

path, prompt, generate = sys.argv[1:]
rows = collections.defaultdict(dict)
for line in open(path):
    model, row, program, pair, rate = line.rstrip("\n").split("\t")
    rows[model, row][program, int(pair)] = float(rate)
print("| model | row | forebay tokens/s | llama.cpp tokens/s | ratio | ratio of each pair |")
print("| --- | --- | --- | --- | --- | --- |")
for (model, row), rates in rows.items():
    pairs = sorted({pair for _, pair in rates})
    ours = [rates["forebay", pair] for pair in pairs if ("forebay", pair) in rates]
    theirs = [rates["llama.cpp", pair] for pair in pairs if ("llama.cpp", pair) in rates]
    ratios = [a / b for a, b in zip(ours, theirs)]
    if not ratios:
        print(f"| {os.path.basename(model)} | {row} | {ours} | {theirs} | one of them failed | |")
        continue
    part, depth = row.split(" @")
    tokens = prompt if part == "prompt" else generate
    name = f"{part} {tokens}" + (f" behind {depth}" if depth != "0" else "")
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"| {os.path.basename(model)} | {name} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} "
          f"| **{statistics.median(ratios):.2f}** | {each} |")
PYTHON
