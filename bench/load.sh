#!/usr/bin/env bash
# Loading a model into memory: forebay against fio's best on the same file, alternating; then warm, half warm, and through a mapping.
#
#   bench/load.sh MODEL [ROUNDS]
#
# fio: io_uring, O_DIRECT, 512 KiB, depth 32 and 64, registered buffers and files, 3 seconds each. forebay: load --cold --repeat 2; the
# first run pays for new memory, which a virtual machine may have to get from its host, the second finds its memory in place.
# Without a profile of this machine and disk, forebay doctor runs first and saves one. Drops the model from the page cache.
# Needs fio and python3. FOREBAY names another forebay program, FOREBAY_FLAGS more options for it. Prints Markdown.
. "$(dirname "$0")/common.sh" 1 "$@"
need fio python3

model=$1 rounds=${2:-5}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# What is compared with fio is the way of reading that doctor found best on this disk.
chosen_by() {
    "$FOREBAY" load "$model" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["chosen_by"])'
}
by=$(chosen_by)
if [ "$by" != "the machine profile" ]; then
    echo "forebay doctor, because loads read by: $by" >&2
    "$FOREBAY" doctor "$(dirname "$model")" >&2
    by=$(chosen_by)
fi
if [ "$by" != "the machine profile" ]; then
    echo "FAILED: forebay doctor has run, but loads read by: $by" >&2
    exit 1
fi

disk() {
    fio --name=read --filename="$model" --readonly --rw=read --ioengine=io_uring --direct=1 --bs=512k --iodepth="$1" \
        --fixedbufs=1 --registerfiles=1 --time_based --runtime=3 --output-format=json >"$results/fio-$2-$1.json"
}

cache_whole() {
    python3 - "$model" <<'PYTHON'
import sys
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 24):
        pass
PYTHON
}

forget_half() {
    python3 - "$model" <<'PYTHON'
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
size, step = os.fstat(file).st_size, 64 << 20
for offset in range(0, size, 2 * step):
    os.posix_fadvise(file, offset, step, os.POSIX_FADV_DONTNEED)
PYTHON
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    disk 32 "$round"
    "$FOREBAY" load "$model" --cold --repeat 2 $FOREBAY_FLAGS --json >"$results/cold-$round.json"
    disk 64 "$round"
    cache_whole
    "$FOREBAY" load "$model" --repeat 3 $FOREBAY_FLAGS --json >"$results/warm-$round.json"
    forget_half
    "$FOREBAY" load "$model" --repeat 3 $FOREBAY_FLAGS --json >"$results/half-$round.json"
done
echo "mmap" >&2
"$FOREBAY" load "$model" --cold --io mmap $FOREBAY_FLAGS --json >"$results/mmap.json"

python3 - "$results" "$model" "$rounds" <<'PYTHON'
import glob, json, os, statistics, sys

results, model, rounds = sys.argv[1:]
fio = [json.load(open(name))["jobs"][0]["read"]["bw_bytes"] for name in glob.glob(f"{results}/fio-*.json")]
best = max(fio)
def loads(name):
    return [json.load(open(f"{results}/{name}-{round}.json")) for round in range(1, int(rounds) + 1)]

cold, warm, half = loads("cold"), loads("warm"), loads("half")
print(f"{os.path.basename(model)}, {os.path.getsize(model) / 1e9:.2f} GB; fio best {best / 1e9:.2f} GB/s, "
      f"median {statistics.median(fio) / 1e9:.2f}, worst {min(fio) / 1e9:.2f}")
print()
print("| load | median GB/s | of fio's best | CPU s/GB | staging MiB | seconds |")
print("| --- | --- | --- | --- | --- | --- |")

def row(name, runs):
    rate = statistics.median(run["bytes_per_second"] for run in runs)
    cpu = statistics.median(run["cpu_seconds_per_gigabyte"] for run in runs)
    seconds = statistics.median(run["seconds"] for run in runs)
    staging = max(run["staging_bytes"] for run in runs) / 2**20
    print(f"| {name} | {rate / 1e9:.2f} | {rate / best:.0%} | {cpu:.3f} | {staging:.0f} | {seconds:.2f} |")
    return seconds

def in_place(loads):
    return [run for load in loads for run in load["runs"][1:]]

row("cold, new memory", [load["runs"][0] for load in cold])
row("cold, memory in place", in_place(cold))
row("warm, memory in place", in_place(warm))
# A run leaves what was cached as it was, so that each begins with half of the file cached.
row("half warm, memory in place", in_place(half))
row("cold, mmap, new memory", json.load(open(f"{results}/mmap.json"))["runs"])
print()

def seconds(load):
    return statistics.median(run["seconds"] for run in load["runs"][1:])

def percent(shares):
    return f"{statistics.median(shares):.0%} ({', '.join(f'{share:.0%}' for share in shares)})"

copies = [load["limit"]["copy_bytes_per_second"] for load in warm]
shares = [load["runs"][0]["bytes"] / seconds(load) / copy for load, copy in zip(warm, copies)]
sums = [seconds(c) / 2 + seconds(w) / 2 for c, w in zip(cold, warm)]
print(f"Warm against the best copy of 1..N threads, round by round: {percent(shares)}; "
      f"copies {min(copies) / 1e9:.1f}-{max(copies) / 1e9:.1f} GB/s.")
print(f"Seconds half warm against half cold + half warm, round by round: "
      f"{percent([seconds(h) / both for h, both in zip(half, sums)])}.")
PYTHON
