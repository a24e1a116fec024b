#!/usr/bin/env bash
# A dense model larger than VRAM: forebay against llama.cpp with as many layers on the GPU as fit the same budget.
#
#   bench/beyond-vram-dense.sh LLAMA_BENCH MODEL
#
# LLAMA_BENCH is the llama-bench program, built with CUDA.
#
# forebay gets --vram VRAM (8GiB) and the machine profile. If there is none for MODEL's disk, `forebay doctor` makes one first.
# llama.cpp gets -ngl NGL. Without NGL, the script searches for the largest number whose VRAM, as reported by nvidia-smi, stays
# within the budget. No other program may use the GPU.
#
# Rows: prompts of PROMPTS (512 2048) tokens, and GENERATE (32) tokens, in PAIRS (2) alternating pairs.
# RAMS (such as "24GiB", needs root) adds rows in which a control group limits each program's memory, page cache included.
# forebay then gets --ram RESERVE_MIB (1536) less, and llama.cpp is stopped after LIMIT (300) seconds.
#
# Needs python3. FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it.
# Prints a Markdown table with predictions and, for rows with limited RAM, the rate that the disk would allow without pauses.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3
. "$(dirname "$0")/limits.sh"

llama_bench=$1 model=$2
vram=${VRAM:-8GiB} pairs=${PAIRS:-2} prompts=${PROMPTS-512 2048} generate=${GENERATE:-32} limit=${LIMIT:-300}
reserve=${RESERVE_MIB:-1536}
runs=$(mktemp)
trap 'unlimit_memory; rm -f "$runs"*' EXIT

plan() { "$FOREBAY" plan "$model" --device cuda --vram "$vram" --ctx 640 2>&1; }
if plan | grep -q "run forebay doctor"; then
    "$FOREBAY" doctor "$(dirname "$model")" >&2
fi
plan >&2 || true

# llama NGL PROMPT GENERATE: tokens per second of llama.cpp with NGL layers on the GPU.
llama() { llama_rate "$2" "$3" -ngl "$1"; }

if [ -n "${NGL:-}" ]; then
    ngl=$NGL
else
    need nvidia-smi
    ngl=$("$FOREBAY" inspect "$model" --json | python3 -c '
import json, sys
info = json.load(sys.stdin)
info = info.get("model", info)
print(max(1, int(int(sys.argv[1]) * info["layers"] / info["weights_bytes"])))
' "$(bytes "$vram")")
    while [ "$ngl" -gt 0 ] && ! llama_fits "$(bytes "$vram")" -ngl "$ngl"; do
        ngl=$((ngl - 1))
    done
fi
echo "llama.cpp: -ngl $ngl" >&2

# run_forebay ROW PROMPT GENERATE [OPTION...]
run_forebay() {
    local row=$1 prompt=$2 tokens=$3
    shift 3
    # FOREBAY_FLAGS is split into words on purpose.
    # shellcheck disable=SC2086
    "${within[@]}" "$FOREBAY" bench "$model" --device cuda --vram "$vram" --prompt-tokens "$prompt" --gen-tokens "$tokens" --repeat 1 \
        $FOREBAY_FLAGS "$@" --json | python3 -c '
import json, sys
row = sys.argv[1]
run = json.load(sys.stdin)
part = run["prompt"] or run["generate"]
sub_layers, stream = run["statistics"]["device_sub_layers"], run["statistics"]["stream"]
where = "/".join(str(sub_layers[kind]["sub_layers"]) for kind in ("in_vram", "streamed", "on_cpu"))
io = stream["io"]
tokens = stream["prompt_tokens"] + stream["generated_tokens"]
disk = ""
if io["busy_fraction"] > 0.02 and not run["prompt"]:
    allowed = io["bytes_read"] / io["busy_seconds"] / (io["bytes_read"] / tokens)
    busy = io["busy_fraction"]
    disk = f"{allowed:.3f} by the disk, busy {busy:.0%}"
predicted, waited = part.get("tokens_per_second_predicted"), sum(sub_layers[kind]["copy_wait_seconds"] for kind in ("few_tokens", "many_tokens"))
notes = [where, f"{predicted:.2f}" if predicted else "", f"{waited:.2f}", disk]
print("\t".join([row, "forebay", str(part["tokens_per_second_median"]), *notes]))
' "$row" >>"$runs"
}

# pair ROW PROMPT GENERATE
pair() {
    echo "$1" >&2
    run_forebay "$@"
    printf '%s\tllama.cpp\t%s\n' "$1" "$(llama "$ngl" "$2" "$3")" >>"$runs"
}

for _ in $(seq "$pairs"); do
    for prompt in $prompts; do
        pair "prompt $prompt" "$prompt" 0
    done
    pair "generate" 0 "$generate"
done
for ram in ${RAMS:-}; do
    drop_caches
    limit_memory "$(bytes "$ram")"
    echo "generate, $ram of RAM" >&2
    run_forebay "generate, $ram of RAM" 0 "${GENERATE_LIMITED:-12}" --ram "$((($(bytes "$ram") >> 20) - reserve))MiB"
    printf '%s\tllama.cpp\t%s\n' "generate, $ram of RAM" "$(llama "$ngl" 0 4)" >>"$runs"
    unlimit_memory
done

python3 - "$runs" "$limit" <<'PYTHON'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    row, program, rate, *notes = line.rstrip("\n").split("\t")
    rows.setdefault(row, {}).setdefault(program, []).append((float(rate), notes))
print("| row | forebay tokens/s | predicted | llama.cpp tokens/s | ratio | sub-layers in VRAM/streamed/on the CPU | waited for copies | disk |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for row, programs in rows.items():
    ours = statistics.median(rate for rate, _ in programs["forebay"])
    theirs = statistics.median(rate for rate, _ in programs["llama.cpp"])
    ratio = f"**{ours / theirs:.2f}**" if theirs else "-"
    them = f"{theirs:.2f}" if theirs else f"no answer in {sys.argv[2]} s"
    where, predicted, waited, disk = programs["forebay"][-1][1]
    print(f"| {row} | {ours:.2f} | {predicted} | {them} | {ratio} | {where} | {waited} s | {disk} |")
PYTHON
