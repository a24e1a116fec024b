#!/usr/bin/env bash
# A mixture-of-experts model larger than VRAM: forebay against llama.cpp with the experts of some layers on the CPU.
#
#   bench/beyond-vram.sh LLAMA_BENCH MODEL
#
# LLAMA_BENCH is the llama-bench program, built with CUDA.
#
# forebay gets --vram VRAM (8GiB) and decides about CPU offload itself, unless the row says otherwise. Run `forebay doctor` on the
# model's folder first, so that it has rates.
# llama.cpp computes the experts of NCMOE layers on the CPU. Without NCMOE, the script searches for the smallest number whose VRAM,
# as reported by nvidia-smi, stays within the budget. No other program may use the GPU.
#
# Rows: prompts of PROMPTS (512 2048) tokens; GENERATE (128) tokens with the model's own routing and with uniform random routing.
# TRACE names a recorded routing trace of the same shape and adds rows that follow it. Only forebay follows the trace, because the
# choice of experts makes no difference to llama.cpp. PAIRS (2) alternating pairs.
# RAMS (such as "10GiB 4GiB", needs root) adds rows in which a control group limits each program's memory, page cache included.
# llama.cpp is then stopped after LIMIT (90) seconds.
#
# Needs python3. FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3
. "$(dirname "$0")/limits.sh"

llama_bench=$1 model=$2
vram=${VRAM:-8GiB} pairs=${PAIRS:-2} prompts=${PROMPTS-512 2048} generate=${GENERATE:-128} limit=${LIMIT:-90}
runs=$(mktemp)
trap 'unlimit_memory; rm -f "$runs"*' EXIT

if [ -n "${NCMOE:-}" ]; then
    ncmoe=$NCMOE
else
    need nvidia-smi
    fits() { llama_fits "$(bytes "$vram")" -ngl 99 -ncmoe "$1"; }
    # A first estimate: a GiB for everything that is not a weight.
    ncmoe=$("$FOREBAY" inspect "$model" --json | python3 -c '
import json, math, sys
info = json.load(sys.stdin)
layer = info["experts"] * info["bytes_per_expert"]
outside = info["weights_bytes"] + 2**30 - int(sys.argv[1])
print(min(max(0, math.ceil(outside / layer)), info["layers"]))
' "$(bytes "$vram")")
    if fits "$ncmoe"; then
        while [ "$ncmoe" -gt 0 ] && fits $((ncmoe - 1)); do
            ncmoe=$((ncmoe - 1))
        done
    else
        layers=$("$FOREBAY" inspect "$model" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["layers"])')
        until ncmoe=$((ncmoe + 1)) && fits "$ncmoe"; do
            [ "$ncmoe" -lt "$layers" ] || break
        done
    fi
fi
echo "llama.cpp: -ngl 99 -ncmoe $ncmoe" >&2

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
experts, stream = run["statistics"].get("device_experts"), run["statistics"].get("stream")
share = "{:.0%}".format
hits = share(experts["hit_rate"]) if experts else ""
disk = share(stream["io"]["busy_fraction"]) if stream and stream["experts_read"] else ""
cpu = experts["experts_on_cpu"] / max(1, experts["misses"]) if experts else 0
print("\t".join([row, "forebay", str(part["tokens_per_second_median"]), hits, share(cpu), disk]))
' "$row" >>"$runs"
}

# run_llama ROW PROMPT GENERATE
run_llama() {
    printf '%s\tllama.cpp\t%s\t\t\t\n' "$1" "$(llama_rate "$2" "$3" -ngl 99 -ncmoe "$ncmoe")" >>"$runs"
}

# pair ROW PROMPT GENERATE [OPTION...]
pair() {
    echo "$1" >&2
    run_forebay "$@"
    run_llama "$1" "$2" "$3"
}

for _ in $(seq "$pairs"); do
    for prompt in $prompts; do
        pair "prompt $prompt" "$prompt" 0
    done
    pair "generate, own routing" 0 "$generate"
    run_forebay "generate, uniform" 0 "$generate" --routing-trace uniform
    run_forebay "generate, uniform, GPU alone" 0 "$generate" --routing-trace uniform --no-cpu-experts
    if [ -n "${TRACE:-}" ]; then
        run_forebay "generate, trace" 0 "$generate" --routing-trace "$TRACE"
        run_forebay "generate, trace, GPU alone" 0 "$generate" --routing-trace "$TRACE" --no-cpu-experts
        run_forebay "generate, trace, CPU offload" 0 "$generate" --routing-trace "$TRACE" --cpu-experts
    fi
done
for ram in ${RAMS:-}; do
    drop_caches
    limit_memory "$(bytes "$ram")"
    routing=()
    [ -z "${TRACE:-}" ] || routing=(--routing-trace "$TRACE")
    run_forebay "generate, $ram of RAM" 0 "$generate" "${routing[@]}"
    run_llama "generate, $ram of RAM" 0 8
    unlimit_memory
done

python3 - "$runs" "$limit" <<'PYTHON'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    row, program, rate, *notes = line.rstrip("\n").split("\t")
    rows.setdefault(row, {}).setdefault(program, []).append((float(rate), notes))
own = "generate, own routing"
print("| row | forebay tokens/s | llama.cpp tokens/s | ratio | hits in VRAM | misses on the CPU | disk busy |")
print("| --- | --- | --- | --- | --- | --- | --- |")
for row, programs in rows.items():
    ours = statistics.median(rate for rate, _ in programs["forebay"])
    # The choice of experts makes no difference to llama.cpp.
    theirs = programs.get("llama.cpp") or rows[own]["llama.cpp"]
    theirs = statistics.median(rate for rate, _ in theirs)
    ratio = f"**{ours / theirs:.2f}**" if theirs else "-"
    them = f"{theirs:.1f}" if theirs else f"no 8 tokens in {sys.argv[2]} s"
    hits, cpu, disk = programs["forebay"][-1][1]
    print(f"| {row} | {ours:.1f} | {them} | {ratio} | {hits} | {cpu} | {disk} |")
PYTHON
