#!/usr/bin/env bash
# Compares two builds of forebay: does a change keep the speed?
#
#   bench/before-after.sh BEFORE AFTER CASES
#
# BEFORE and AFTER are two forebay programs. CASES is a file with one case per line: a name, a tab, and the arguments of
# `forebay bench` (the model first). Lines that begin with # are skipped. Every round runs BEFORE, AFTER and BEFORE again, in
# rotating order, so that the second run of BEFORE shows how far two runs of the same program differ. ROUNDS (5) rounds.
# Prints a Markdown table: the median ratio AFTER / BEFORE with its range, and the same for BEFORE / BEFORE.
# Needs python3.
FOREBAY=${2:-} . "$(dirname "$0")/common.sh" 3 "$@"
need python3

before=$1 after=$2 cases=$3 rounds=${ROUNDS:-5}
runs=$(mktemp)
trap 'rm -f "$runs"' EXIT

# measure LABEL PROGRAM CASE ROUND ARGUMENT...: adds one line for each part that was measured.
measure() {
    local label=$1 program=$2 name=$3 round=$4
    shift 4
    "$program" bench "$@" --repeat "${REPEAT:-1}" --json | python3 -c '
import json, sys
label, name, round_ = sys.argv[1:]
run = json.load(sys.stdin)
for part in ("prompt", "generate"):
    if run[part]:
        rate = run[part]["tokens_per_second_median"]
        print(f"{name}\t{part}\t{label}\t{round_}\t{rate}")
' "$label" "$name" "$round" >>"$runs"
}

for ((round = 0; round < rounds; round++)); do
    while IFS=$'\t' read -r name arguments; do
        [[ -n $name && $name != \#* ]] || continue
        echo "round $((round + 1)) of $rounds: $name" >&2
        read -ra words <<<"$arguments"
        order=("before $before" "after $after" "again $before")
        for step in 0 1 2; do
            read -r label program <<<"${order[(step + round) % 3]}"
            measure "$label" "$program" "$name" "$round" "${words[@]}" </dev/null
        done
    done <"$cases"
done

python3 - "$runs" <<'PYTHON'
import collections, statistics, sys

rates = collections.defaultdict(lambda: collections.defaultdict(dict))
for line in open(sys.argv[1]):
    name, part, label, round_, rate = line.rstrip("\n").split("\t")
    rates[name, part][label][int(round_)] = float(rate)

def ratios(runs, over, under):
    values = [runs[over][r] / runs[under][r] for r in runs[under] if r in runs[over]]
    return f"**{statistics.median(values):.3f}** ({min(values):.2f}-{max(values):.2f})"

print("| case | before tokens/s | after tokens/s | after / before | before / before |")
print("| --- | --- | --- | --- | --- |")
for (name, part), runs in rates.items():
    middle = [f"{statistics.median(runs[label].values()):.1f}" for label in ("before", "after")]
    print(f"| {name}, {part} | {middle[0]} | {middle[1]} | {ratios(runs, 'after', 'before')} | {ratios(runs, 'again', 'before')} |")
PYTHON
