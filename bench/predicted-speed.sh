#!/usr/bin/env bash
# Speeds that `assess` predicts for RAM budgets on the CPU, against the speed of its recording with these budgets (same prompts,
# seed and tokens), and against `bench`.
#
#   bench/predicted-speed.sh MODEL ROUNDS RAM...
#
# MODEL is a mixture-of-experts model on a disk with room for what `doctor` writes. RAM is a size such as 2GiB.
# Each round makes a profile with doctor, records with everything in memory (the source of the hits) and with each budget, and
# benches with each budget. Every run starts with a cold page cache (needs root) and reads with direct I/O.
# The table has medians over the rounds, and the range of the ratio within a round, because machines drift between rounds.
# FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it.
. "$(dirname "$0")/common.sh" 3 "$@"
need python3

model=$1 rounds=$2
shift 2
if [ "$(id -u)" != 0 ]; then
    echo "this needs root: it drops the page cache" >&2
    exit 1
fi
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export XDG_CONFIG_HOME=$results/config
cat >"$results/prompts.txt" <<'TEXT'
The harbour was empty when the last boat came in, and nobody asked where it had been.
---
A cache that is too small for one cycle of its accesses misses all of them. To see why, consider
---
def merge(left, right):
    """Merges two sorted lists."""
---
If every train is late and this is a train, then it follows that
TEXT

# Runs a command of forebay with a cold page cache and keeps what it prints: cold NAME COMMAND...
cold() {
    local name=$1
    shift
    sync
    echo 3 >/proc/sys/vm/drop_caches
    # FOREBAY_FLAGS is split into words on purpose.
    # shellcheck disable=SC2086
    "$FOREBAY" "$@" --device cpu --json $FOREBAY_FLAGS >"$results/$name.json" 2>"$results/$name.err" || {
        cat "$results/$name.err" >&2
        exit 1
    }
}
measure() {
    local name=$1
    shift
    cold "$name" assess "$model" --prompts "$results/prompts.txt" --tokens 32 "$@"
    cold "$name-bench" bench "$model" --prompt-tokens 0 --gen-tokens 96 --repeat 2 "$@"
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    "$FOREBAY" doctor "$(dirname "$model")" --json >"$results/doctor.json"
    measure "$round-all"
    for ram; do
        measure "$round-$ram" --ram "$ram"
    done
done

python3 - "$results" "$rounds" "$@" <<'PYTHON'
import json, statistics, sys

results, rounds, budgets = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def read(name):
    return json.load(open(f"{results}/{name}.json"))

def predicted_at(predictions, ram):
    """Tokens/s at a budget between those of the table, whose seconds lie on a line."""
    points = [(p["ram_bytes"], 1 / p["tokens_per_second"]) for p in predictions]
    for (low, slow), (high, fast) in zip(points, points[1:]):
        if low <= ram <= high:
            return 1 / (slow + (fast - slow) * (ram - low) / (high - low))
    raise SystemExit(f"no prediction for a budget of {ram} bytes: give one between {points[0][0]} and {points[-1][0]}")

def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
numbers = range(1, rounds + 1)
every = [read(f"{number}-all")["models"][0] for number in numbers]
first = every[0]
print(f"{first['name']}: {first['weights_bytes'] / 1e9:.2f} GB; medians of {rounds} rounds.")
print()
print("| RAM | predicted: hits, tokens/s | recorded tokens/s | predicted / recorded | bench: hits, tokens/s | "
      "predicted / bench |")
print("| --- | --- | --- | --- | --- | --- |")
for budget in [*budgets, "all"]:
    by_ram = [one["predictions"]["by_ram"] for one in every]
    ram = by_ram[0][-1]["ram_bytes"] if budget == "all" else int(budget[:-3]) * UNITS[budget[-3:]]
    said = [predicted_at(points, ram) for points in by_ram]
    runs = [read(f"{number}-{budget}")["models"][0]["measured"] for number in numbers]
    recorded = [run["tokens_per_second"] for run in runs]
    benches = [read(f"{number}-{budget}-bench") for number in numbers]
    rates = [bench["generate"]["tokens_per_second_median"] for bench in benches]
    hits = benches[0]["statistics"]["stream"]["hit_rate"]
    of = lambda measured: spread([p / m for p, m in zip(said, measured)])
    median = lambda values: f"{statistics.median(values):.1f}"
    print(f"| {budget} | {runs[0]['predicted']['hit_rate']:.1%}, {median(said)} | {median(recorded)} | {of(recorded)} | "
          f"{hits:.1%}, {median(rates)} | {of(rates)} |")
PYTHON
