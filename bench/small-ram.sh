#!/usr/bin/env bash
# A model larger than memory: forebay with a budget against llama.cpp with mmap, in memory control groups of the same size.
#
#   bench/small-ram.sh MODEL LLAMA_BENCH MEMORY_MIB RAM_MIB [GEN_TOKENS] [THREADS] [LLAMA_SECONDS]
#
# MEMORY_MIB limits each program as a whole. RAM_MIB is forebay's --ram and must leave room for the KV cache and 200 MiB.
# Defaults: 64 tokens, 2 threads. llama.cpp is stopped after 240 seconds. It then made fewer than its 12 tokens, which gives an
# upper bound for its rate.
# Needs root (control groups v1 or v2, dropping the page cache) and python3.
# FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 4 "$@"
need python3
. "$(dirname "$0")/limits.sh"

model=$1 llama_bench=$2 memory_mib=$3 ram_mib=$4
generate=${5:-64} threads=${6:-2} llama_seconds=${7:-240}
llama_tokens=12
if [ "$(id -u)" != 0 ]; then
    echo "this needs root: it makes a memory cgroup and drops the page cache" >&2
    exit 1
fi

results=$(mktemp -d)
trap 'unlimit_memory; rm -rf "$results"' EXIT
limit_memory $((memory_mib << 20))

# Runs a command inside the cgroup with a cold page cache: inside NAME COMMAND...
inside() {
    local log=$results/$1 started
    shift
    drop_caches
    cat /proc/diskstats >"$log.disk-before"
    local status=0
    started=$(date +%s%N)
    "${within[@]}" "$@" >"$log.out" 2>"$log.err" || status=$?
    echo $(($(date +%s%N) - started)) >"$log.nanoseconds"
    cat /proc/diskstats >"$log.disk-after"
    echo "$status" >"$log.status"
}

echo "forebay, --ram ${ram_mib}MiB inside $memory_mib MiB" >&2
inside forebay "$FOREBAY" bench "$model" --device cpu --ram "${ram_mib}MiB" --threads "$threads" \
    --prompt-tokens 0 --gen-tokens "$generate" --repeat 2 --json $FOREBAY_FLAGS
if [ "$(cat "$results/forebay.status")" != 0 ]; then
    cat "$results/forebay.err" >&2
    exit 1
fi
echo "llama.cpp with mmap inside $memory_mib MiB, at most $llama_seconds seconds" >&2
inside llama timeout --signal=KILL "$llama_seconds" "$llama_bench" -m "$model" -t "$threads" \
    -p 0 -n "$llama_tokens" -r 1 --no-warmup -o json

python3 - "$results" "$model" "$memory_mib" "$ram_mib" "$llama_tokens" "$llama_seconds" "$threads" <<'PYTHON'
import json, os, sys

results, model, memory, ram, llama_tokens, llama_seconds, threads = sys.argv[1:]
run = json.load(open(f"{results}/forebay.out"))
ours = run["generate"]["tokens_per_second_median"]
stream = run["statistics"]["stream"]
status = int(open(f"{results}/llama.status").read())
try:
    theirs, bound = json.load(open(f"{results}/llama.out"))[0]["avg_ts"], ""
except (ValueError, IndexError):
    # Stopped before its tokens were done, or by the memory limit.
    theirs, bound = int(llama_tokens) / float(llama_seconds), "< "

def disk(name):
    """Bytes that the model's disk has read, and milliseconds with a request there."""
    device = os.stat(model).st_dev
    for line in open(f"{results}/{name}"):
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[5]) * 512, int(fields[12])
    return 0, 0

def during(name):
    before, after = disk(f"{name}.disk-before"), disk(f"{name}.disk-after")
    milliseconds = int(open(f"{results}/{name}.nanoseconds").read()) / 1e6
    return after[0] - before[0], (after[1] - before[1]) / milliseconds

size = run["model"]["weights_bytes"]
print(f"{os.path.basename(model)}: {size / 1e9:.2f} GB of weights, {memory} MiB for the whole program, "
      f"{threads} threads, cold page cache")
print()
print("| program | generate tokens/s | bytes read from the disk | disk busy, by the kernel's account |")
print("| --- | --- | --- | --- |")
for name, rate, sign in (("forebay", ours, ""), ("llama", theirs, bound)):
    total, busy = during(name)
    what = f"forebay --ram {ram}MiB {os.environ.get('FOREBAY_FLAGS', '')}".rstrip() if name == "forebay" else "llama.cpp, mmap"
    if name == "llama" and status != 0:
        what += f" (stopped after {llama_seconds} s)"
    print(f"| {what} | {sign}{rate:.3g} | {total / 1e9:.2f} GB | {busy:.0%} |")
print()
busy = [part["generate_processors_busy"] for part in run["runs"]]
print(f"Ratio: {'> ' if bound else ''}{ours / theirs:.0f}x. Hit rate {stream['hit_rate']:.1%}, "
      f"disk busy {stream['io']['busy_fraction']:.0%} at "
      f"{stream['io']['bytes_read'] / stream['io']['busy_seconds'] / 1e9:.2f} GB/s, "
      f"processors busy {', '.join(f'{part:.0%}' for part in busy)}, "
      f"waited {stream['wait_seconds']:.1f} of {stream['io']['elapsed_seconds']:.1f} s, peak resident "
      f"{run['statistics']['peak_resident_bytes'] / 2**20:.0f} MiB.")
PYTHON
