#!/usr/bin/env bash
# A model with experts that a part of a GPU's memory does not hold, against llama.cpp with experts of some layers on the CPU.
#
#   bench/beyond-vram.sh LLAMA_BENCH MODEL
#
# LLAMA_BENCH is the llama-bench program, built with CUDA. forebay gets --vram VRAM (8GiB) and no other hint; llama.cpp computes
# the experts of NCMOE (30) layers on the CPU: choose the smallest number with which it stays within VRAM. PAIRS (2) runs of each,
# alternating. Rows: prompts of PROMPTS (512 2048) tokens; GENERATE (128) tokens with the model's own routing, with experts chosen
# uniformly and, if TRACE names a recorded routing trace of the same shape, with its experts: forebay alone follows them, for llama.cpp
# it makes no difference who is chosen. As root, with control groups version 2, RAMS (as in "10GiB 4GiB") limits the memory of either
# program with all its page cache, and llama.cpp is stopped after LIMIT (90) seconds.
# Needs python3. FOREBAY names another forebay program, FOREBAY_FLAGS more options for it. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3

llama_bench=$1 model=$2
vram=${VRAM:-8GiB} ncmoe=${NCMOE:-30} pairs=${PAIRS:-2} prompts=${PROMPTS-512 2048} generate=${GENERATE:-128} limit=${LIMIT:-90}
threads=$(python3 -c 'import os; print(len(os.sched_getaffinity(0)))')
runs=$(mktemp)
trap 'rm -f "$runs"' EXIT
group=

# within COMMAND...: in the control group, if there is one.
within() {
    if [ -z "$group" ]; then
        "$@"
    else
        sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" "$@"
    fi
}

# run_forebay ROW PROMPT GENERATE [OPTION...]
run_forebay() {
    local row=$1 prompt=$2 tokens=$3
    shift 3
    # FOREBAY_FLAGS are words.
    # shellcheck disable=SC2086
    within "$FOREBAY" bench "$model" --device cuda --vram "$vram" --prompt-tokens "$prompt" --gen-tokens "$tokens" --repeat 1 \
        $FOREBAY_FLAGS "$@" --json | python3 -c '
import json, sys
row = sys.argv[1]
run = json.load(sys.stdin)
part = run["prompt"] or run["generate"]
experts, stream = run["statistics"].get("device_experts"), run["statistics"].get("stream")
hits = f"{experts["hit_rate"]:.0%}" if experts else ""
disk = f"{stream["io"]["busy_fraction"]:.0%}" if stream and stream["experts_read"] else ""
cpu = experts["experts_on_cpu"] / max(1, experts["misses"]) if experts else 0
print("\t".join([row, "forebay", str(part["tokens_per_second_median"]), hits, f"{cpu:.0%}", disk]))
' "$row" >>"$runs"
}

# run_llama ROW PROMPT GENERATE
run_llama() {
    timeout --signal=KILL "$limit" bash -c '"$@"' - within_llama "$2" "$3" >"$runs.llama" 2>/dev/null || true
    python3 - "$1" "$runs.llama" >>"$runs" <<'PYTHON'
import json, sys
row, path = sys.argv[1:]
try:
    rate = json.load(open(path))[0]["avg_ts"]
except (ValueError, IndexError, OSError):
    rate = 0
print("\t".join([row, "llama.cpp", str(rate), "", "", ""]))
PYTHON
    rm -f "$runs.llama"
}
within_llama() {
    within "$llama_bench" -m "$model" -ngl 99 -ncmoe "$ncmoe" -fa 1 -t "$threads" -p "$1" -n "$2" -r 1 -o json
}
export -f within within_llama
export group llama_bench model ncmoe threads

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
    run_forebay "generate, uniform, CPU helps" 0 "$generate" --routing-trace uniform --cpu-experts
    if [ -n "${TRACE:-}" ]; then
        run_forebay "generate, trace" 0 "$generate" --routing-trace "$TRACE"
        run_forebay "generate, trace, CPU helps" 0 "$generate" --routing-trace "$TRACE" --cpu-experts
    fi
done
for ram in ${RAMS:-}; do
    group=/sys/fs/cgroup/forebay-beyond-vram
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control 2>/dev/null || true
    mkdir -p "$group"
    sync && echo 3 >/proc/sys/vm/drop_caches
    numfmt --from=iec-i --suffix=B "$ram" | tr -d B >"$group/memory.max"
    echo 0 >"$group/memory.swap.max" 2>/dev/null || true
    export group
    routing=()
    [ -z "${TRACE:-}" ] || routing=(--routing-trace "$TRACE")
    run_forebay "generate, $ram of RAM" 0 "$generate" "${routing[@]}"
    run_llama "generate, $ram of RAM" 0 8
    # What was killed takes a while to give its memory back.
    for _ in $(seq 100); do
        # The kernel says that such files have no bytes.
        [ -n "$(cat "$group/cgroup.procs")" ] || break
        xargs -r kill -KILL <"$group/cgroup.procs" 2>/dev/null || true
        sleep 0.2
    done
    rmdir "$group" || echo "the control group $group stays: somebody is in it" >&2
    group=
    export group
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
    # Who is chosen makes no difference to llama.cpp.
    theirs = programs.get("llama.cpp") or rows[own]["llama.cpp"]
    theirs = statistics.median(rate for rate, _ in theirs)
    ratio = f"**{ours / theirs:.2f}**" if theirs else "-"
    them = f"{theirs:.1f}" if theirs else f"no 8 tokens in {sys.argv[2]} s"
    hits, cpu, disk = programs["forebay"][-1][1]
    print(f"| {row} | {ours:.1f} | {them} | {ratio} | {hits} | {cpu} | {disk} |")
PYTHON
