# shellcheck shell=bash
# Memory limits for benchmark scripts. Source it after common.sh.
#
# limit_memory BYTES creates a control group with that much memory, page cache included.
# "${within[@]}" COMMAND... runs a command in the group. Without a limit, "${within[@]}" is empty.
# unlimit_memory ends the processes that are left in the group and removes it.
# Groups need root. Versions 1 and 2 are supported.

group= within=()

limit_memory() {
    local root=/sys/fs/cgroup name=forebay-bench-$$ limit
    if [ -e "$root/cgroup.controllers" ]; then
        # It may be on already, and then may not be asked for where processes are.
        echo +memory >"$root/cgroup.subtree_control" 2>/dev/null || true
        limit=memory.max
    elif [ -d "$root/memory" ]; then
        root=$root/memory limit=memory.limit_in_bytes
    else
        echo "there are no control groups below $root that limit memory" >&2
        return 1
    fi
    mkdir "$root/$name"
    group=$root/$name
    if [ ! -e "$group/$limit" ]; then
        echo "control groups do not limit memory here: $group has no $limit" >&2
        unlimit_memory
        return 1
    fi
    echo "$1" >"$group/$limit"
    [ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
    # shellcheck disable=SC2016
    within=(sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group")
}

unlimit_memory() {
    local ended=$group members
    within=() group=
    [ -n "$ended" ] || return 0
    # Killed processes take a while to free their memory.
    for _ in $(seq 100); do
        # The kernel reports a size of 0 for such files, so test them by reading.
        members=$(cat "$ended/cgroup.procs")
        [ -n "$members" ] || break
        # shellcheck disable=SC2086
        kill -KILL $members 2>/dev/null || true
        sleep 0.2
    done
    rmdir "$ended" || echo "the control group $ended stays: a process is still in it" >&2
}

# Drops the whole page cache, so that the next reads come from the disk.
drop_caches() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}

# llama_rate PROMPT GENERATE OPTION...: tokens per second of $llama_bench with $model, in the control
# group if there is one; 0 if there is no answer within $limit seconds.
llama_rate() {
    local prompt=$1 tokens=$2 answer
    shift 2
    answer=$(mktemp)
    # On one GPU only: it would spread the layers over all GPUs.
    CUDA_VISIBLE_DEVICES=0 timeout --signal=KILL "$limit" "${within[@]}" "$llama_bench" -m "$model" "$@" -fa 1 \
        -t "$threads" -p "$prompt" -n "$tokens" -r 1 -o json >"$answer" 2>/dev/null || true
    python3 -c '
import json, sys
try:
    print(json.load(open(sys.argv[1]))[0]["avg_ts"])
except (ValueError, IndexError, OSError):
    print(0)
' "$answer"
    rm -f "$answer"
}

# llama_fits BUDGET OPTION...: whether $llama_bench with these options reads a prompt of 512 tokens and answers within BUDGET
# bytes of VRAM, by the peak that the driver reports. VRAM that was in use before does not count.
llama_fits() {
    local budget=$1 before most=0 used rate
    shift
    before=$(vram_mib)
    llama_rate 512 1 "$@" >"$runs.rate" &
    while kill -0 $! 2>/dev/null; do
        used=$(vram_mib)
        [ "$used" -le "$most" ] || most=$used
        sleep 0.1
    done
    rate=$(cat "$runs.rate")
    rm -f "$runs.rate"
    most=$((most - before))
    echo "llama.cpp $*: $most MiB of VRAM, $rate tokens/s" >&2
    [ "$rate" != 0 ] && [ $((most << 20)) -le "$budget" ]
}

vram_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id=0; }

bytes() { numfmt --from=iec-i --suffix=B "$1" | tr -d B; }
threads=$(python3 -c 'import os; print(len(os.sched_getaffinity(0)))')
