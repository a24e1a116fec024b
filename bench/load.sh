#!/usr/bin/env bash
# Loading a model into RAM: forebay against fio on the same file, alternating. Then warm, half warm, and through a memory map.
#
#   bench/load.sh MODEL [ROUNDS]
#
# fio reads the whole file once with io_uring, O_DIRECT, 512 KiB, registered buffers and files, and depths 32 and 64 in turn. Its
# buffers are in huge pages (glibc 2.35 and later), as forebay's are: a virtual disk may be half as fast into scattered pages.
# forebay runs `load --cold --repeat 2 --no-limit`. The first run includes the cost of new memory, which a virtual machine may have
# to get from its host. The second run finds its memory in place.
#
# A token bucket may throttle a virtual disk: fast after a pause, slow from then on. So that both programs are treated alike, every
# load is between two passes of fio, one of each depth, with nothing else between, and a pass of fio goes first.
#
# If there is no profile of this machine and disk, forebay doctor runs first and saves one. The script drops the model from the
# page cache. DEVICE=cuda loads into VRAM and leaves out the memory map. COLD=1 measures cold loads only.
# Needs fio and python3. FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it. Prints Markdown.
. "$(dirname "$0")/common.sh" 1 "$@"
need fio python3

model=$1 rounds=${2:-5}
device=${DEVICE:-cpu}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

load() {
    "$FOREBAY" load "$model" --device "$device" $FOREBAY_FLAGS --json "$@"
}

# Compare fio with the way of reading that doctor found best on this disk.
chosen_by() {
    load --no-limit | python3 -c 'import json, sys; print(json.load(sys.stdin)["chosen_by"])'
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

# disk PASS: the whole file, once.
disk() {
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=read --filename="$model" --readonly --rw=read --ioengine=io_uring --direct=1 --bs=512k \
        --iodepth=$(($1 % 2 ? 64 : 32)) --fixedbufs=1 --registerfiles=1 --output-format=json >"$results/fio-$1.json"
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

disk 0
for round in $(seq "$rounds"); do
    echo "cold: round $round of $rounds" >&2
    load --cold --repeat 2 --no-limit >"$results/cold-$round.json"
    disk "$round"
done
if [ -z "${COLD:-}" ]; then
    for round in $(seq "$rounds"); do
        echo "warm and half warm: round $round of $rounds" >&2
        cache_whole
        load --repeat 3 >"$results/warm-$round.json"
        forget_half
        load --repeat 3 --no-limit >"$results/half-$round.json"
        load --cold --repeat 2 --no-limit >"$results/beside-$round.json"
    done
    if [ "$device" = cpu ]; then
        echo "mmap" >&2
        load --cold --io mmap --no-limit >"$results/mmap.json"
    fi
fi

python3 - "$results" "$model" "$rounds" <<'PYTHON'
import json, os, statistics, sys

results, model, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])

def answer(name):
    return json.load(open(f"{results}/{name}.json"))

def loads(name):
    return [answer(f"{name}-{round}") for round in range(1, rounds + 1)]

def percent(shares):
    return f"median {statistics.median(shares):.0%} ({', '.join(f'{share:.0%}' for share in shares)})"

fio = [answer(f"fio-{number}")["jobs"][0]["read"]["bw_bytes"] for number in range(rounds + 1)]
best = max(fio)
cold = loads("cold")
where = cold[0].get("device", {}).get("name", "host memory")
engine = cold[0]["engine"]["name"]
print(f"{os.path.basename(model)}, {os.path.getsize(model) / 1e9:.2f} GB, to {where} by {engine}, {cold[0]['request_bytes'] >> 10} KiB, "
      f"{cold[0]['queue_depth']} at a time; fio whole file, depths 32 and 64 in turn, GB/s: "
      f"{', '.join(f'{rate / 1e9:.2f}' for rate in fio)} (best {best / 1e9:.2f}, median {statistics.median(fio) / 1e9:.2f})")
print()
print("| load | median GB/s | of fio's best | CPU s/GB | staging MiB | seconds |")
print("| --- | --- | --- | --- | --- | --- |")

def row(name, runs):
    rate = statistics.median(run["bytes_per_second"] for run in runs)
    cpu = statistics.median(run["cpu_seconds_per_gigabyte"] for run in runs)
    seconds = statistics.median(run["seconds"] for run in runs)
    staging = max(run["staging_bytes"] for run in runs) / 2**20
    print(f"| {name} | {rate / 1e9:.2f} | {rate / best:.0%} | {cpu:.3f} | {staging:.0f} | {seconds:.2f} |")

def in_place(loads):
    return [run for load in loads for run in load["runs"][1:]]

row("cold, new memory", [load["runs"][0] for load in cold])
row("cold, memory in place", in_place(cold))
whole = os.path.exists(f"{results}/warm-1.json")
if whole:
    warm, half = loads("warm"), loads("half")
    row("warm, memory in place", in_place(warm))
    # A run leaves the page cache as it was, so each run begins with half of the file cached.
    row("half warm, memory in place", in_place(half))
if os.path.exists(f"{results}/mmap.json"):
    row("cold, mmap, new memory", answer("mmap")["runs"])
print()

# As a share of fio's rates right before and right after.
def beside(index):
    return [load["runs"][index]["bytes_per_second"] / statistics.harmonic_mean(fio[round:round + 2])
            for round, load in enumerate(cold)]

rates = ", ".join(f"{load['runs'][1]['bytes_per_second'] / 1e9:.2f}" for load in cold)
print(f"Cold, memory in place, GB/s: {rates}. Against the passes of fio before and after, round by round: {percent(beside(1))}; "
      f"new memory: {percent(beside(0))}.")

def seconds(load):
    return statistics.median(run["seconds"] for run in load["runs"][1:])

if whole:
    limits = [load["limit"].get("device_bytes_per_second") or load["limit"]["copy_bytes_per_second"] for load in warm]
    shares = [load["runs"][0]["bytes"] / seconds(load) / limit for load, limit in zip(warm, limits)]
    what = "copies from pinned memory" if "device" in warm[0] else "the best copy of 1..N threads"
    print(f"Warm against {what}, round by round: {percent(shares)}; "
          f"these {min(limits) / 1e9:.1f}-{max(limits) / 1e9:.1f} GB/s.")
    # Cold loads right after those of half warm files: the disk's rate may have changed within minutes.
    sums = [seconds(c) / 2 + seconds(w) / 2 for c, w in zip(loads("beside"), warm)]
    print(f"Seconds half warm against half cold (right behind) + half warm, round by round: "
          f"{percent([seconds(h) / both for h, both in zip(half, sums)])}.")
PYTHON
