#!/usr/bin/env bash
# Cost of recording routing while text is generated: with and without --trace-routing in turns.
#
#   bench/recording.sh MODEL [PAIRS] [TOKENS]
#
# First, within one process, PAIRS (100) pairs of stretches of TOKENS (16) tokens, without and with router scores. Rates differ
# more between processes than a recording costs. Then `bench` as a user runs it: a twentieth as many pairs (at least three) of 8
# times as many tokens. Ratios are medians over pairs, and the order within pairs changes.
# The model must fit into memory and should be in the page cache.
# FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it. RECORDING_COST names another build of the example of
# that name.
. "$(dirname "$0")/common.sh" 1 "$@"
need python3

model=$1 pairs=${2:-100} tokens=${3:-16}
if [ -z "${RECORDING_COST:-}" ]; then
    (cd "$root" && cargo build --release --quiet --package forebay-engine --example recording_cost)
    RECORDING_COST=${CARGO_TARGET_DIR:-$root/target}/release/examples/recording_cost
fi
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

for what in plain scores; do
    "$RECORDING_COST" "$model" "$pairs" "$tokens" "$what"
done

# Tokens a second of one process: rate [OPTION...]
rate() {
    rm -f "$results/trace"
    "$FOREBAY" bench "$model" --device cpu --prompt-tokens 0 --gen-tokens $((8 * tokens)) --repeat 1 --json "$@" $FOREBAY_FLAGS |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["generate"]["tokens_per_second_median"])'
}

processes=$((pairs / 20 > 3 ? pairs / 20 : 3))
for pair in $(seq "$processes"); do
    if [ $((pair % 2)) = 0 ]; then
        without=$(rate)
        with=$(rate --trace-routing "$results/trace")
    else
        with=$(rate --trace-routing "$results/trace")
        without=$(rate)
    fi
    echo "$with $without"
done >"$results/rates"
python3 - "$results/rates" <<'PYTHON'
import statistics, sys

pairs = [[float(rate) for rate in line.split()] for line in open(sys.argv[1])]
ratios = sorted(with_ / without for with_, without in pairs)
print(f"{len(pairs)} pairs of processes: {statistics.median(without for _, without in pairs):.1f} tokens/s without; "
      f"with a recording {statistics.median(ratios):.3f} of that ({ratios[0]:.3f} to {ratios[-1]:.3f})")
PYTHON
