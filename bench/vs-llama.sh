#!/usr/bin/env bash
# forebay against llama.cpp on the CPU with the weights in memory: alternating runs, ratios of one sitting.
#
#   bench/vs-llama.sh MODEL LLAMA_BENCH [PAIRS] [PROMPT_TOKENS] [GEN_TOKENS] [THREADS]
#
# MODEL is a GGUF file, LLAMA_BENCH the llama-bench program. Defaults: 5 pairs, 512 and 64 tokens, 2 threads.
# Absolute rates drift, so the runs alternate, every second pair in reverse order, and the ratio of each pair is taken.
# Needs python3. FOREBAY names another forebay program. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3

model=$1 llama_bench=$2 pairs=${3:-5} prompt=${4:-512} generate=${5:-64} threads=${6:-2}
runs=$(mktemp)
trap 'rm -f "$runs"' EXIT

run_forebay() {
    "$FOREBAY" bench "$model" --device cpu --threads "$threads" --prompt-tokens "$prompt" \
        --gen-tokens "$generate" --repeat 1 --json |
        python3 -c '
import json, sys
run = json.load(sys.stdin)
for part in ("prompt", "generate"):
    print("forebay", sys.argv[1], part, run[part]["tokens_per_second_median"])
' "$1" >>"$runs"
}

run_llama() {
    "$llama_bench" -m "$model" -t "$threads" -p "$prompt" -n "$generate" -r 1 -o json 2>/dev/null |
        python3 -c '
import json, sys
for run in json.load(sys.stdin):
    print("llama", sys.argv[1], "prompt" if run["n_gen"] == 0 else "generate", run["avg_ts"])
' "$1" >>"$runs"
}

for ((pair = 0; pair < pairs; pair++)); do
    echo "pair $((pair + 1)) of $pairs" >&2
    run_pair "$pair" "$pair"
done

python3 - "$runs" "$(basename "$model")" "$threads" "$prompt" "$generate" <<'PYTHON'
import collections, statistics, subprocess, sys

path, model, threads, prompt, generate = sys.argv[1:]
rates = collections.defaultdict(dict)
for line in open(path):
    program, pair, part, rate = line.split()
    rates[part][program, int(pair)] = float(rate)
cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "?")
print(f"{model}, {threads} threads, {cpu}")
print()
print("| part | forebay tokens/s | llama.cpp tokens/s | ratio | ratio of each pair |")
print("| --- | --- | --- | --- | --- |")
for part, name in (("prompt", f"prompt {prompt}"), ("generate", f"generate {generate}")):
    pairs = sorted({pair for _, pair in rates[part]})
    ours = [rates[part]["forebay", pair] for pair in pairs]
    theirs = [rates[part]["llama", pair] for pair in pairs]
    ratios = [a / b for a, b in zip(ours, theirs)]
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"| {name} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} "
          f"| **{statistics.median(ratios):.2f}** | {each} |")
PYTHON
