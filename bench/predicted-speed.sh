#!/usr/bin/env bash
# Speeds that `assess` predicts for RAM budgets against the speeds at which it then records with them: the same prompts, seed and so tokens.
#
#   bench/predicted-speed.sh MODEL ROUNDS RAM...
#
# MODEL has experts and lies on a disk with room for what `doctor` writes; RAM is as in 2GiB. doctor measures disk and memory first, into a
# profile of its own. Each round records with everything in memory, where the predictions come from, and with each budget, every
# time with a cold page cache (which needs root). Budgets are read past the page cache, so nothing of it helps them.
# The table has medians over the rounds, and the range of the ratio within a round: machines drift between rounds.
# FOREBAY names another forebay program, FOREBAY_FLAGS more options for it.
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

echo "measuring disk and memory" >&2
"$FOREBAY" doctor "$(dirname "$model")" --json >"$results/doctor.json"

# Records with these options: record NAME [OPTION...]
record() {
    local name=$1
    shift
    sync
    echo 3 >/proc/sys/vm/drop_caches
    "$FOREBAY" assess "$model" --prompts "$results/prompts.txt" --tokens 32 --device cpu --json "$@" $FOREBAY_FLAGS \
        >"$results/$name.json" 2>"$results/$name.err" || { cat "$results/$name.err" >&2 && exit 1; }
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    record "$round-all"
    for ram; do
        record "$round-$ram" --ram "$ram"
    done
done

python3 - "$results" "$rounds" "$@" <<'PYTHON'
import json, statistics, sys

results, rounds, budgets = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def model(name):
    return json.load(open(f"{results}/{name}.json"))["models"][0]

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
every = [model(f"{number}-all") for number in range(1, rounds + 1)]
first = every[0]
print(f"{first['name']}: {first['weights_bytes'] / 1e9:.2f} GB; {first['predictions_about']}.")
print()
print("| RAM | hits | predicted tokens/s, from a recording in memory | measured | predicted / measured | "
      "the same from its own computing time | computing, ms: predicted, measured | waiting, ms: predicted, measured |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for budget in budgets:
    ram = int(budget[:-3]) * UNITS[budget[-3:]]
    runs = [model(f"{number}-{budget}") for number in range(1, rounds + 1)]
    measured = [run["measured"] for run in runs]
    rates = [m["tokens_per_second"] for m in measured]
    before = [predicted_at(all["predictions"], ram) for all in every]
    own = [m["predicted"]["tokens_per_second"] for m in measured]
    ms = lambda values: f"{1e3 * statistics.median(values):.1f}"
    print(f"| {budget} | {measured[0]['predicted']['hit_rate']:.1%} | {statistics.median(before):.1f} | {statistics.median(rates):.1f} | "
          f"{spread([b / r for b, r in zip(before, rates)])} | {spread([o / r for o, r in zip(own, rates)])} | "
          f"{ms([all['measured']['compute_seconds_per_token'] for all in every])}, {ms([m['compute_seconds_per_token'] for m in measured])} | "
          f"{ms([m['predicted']['read_seconds_per_token'] for m in measured])}, {ms([m['wait_seconds_per_token'] for m in measured])} |")
rates = [all["measured"]["tokens_per_second"] for all in every]
print(f"| all of it | {every[0]['measured']['predicted']['hit_rate']:.1%} | | {statistics.median(rates):.1f} | | "
      f"{spread([all['measured']['predicted']['tokens_per_second'] / rate for all, rate in zip(every, rates)])} | | |")
PYTHON
