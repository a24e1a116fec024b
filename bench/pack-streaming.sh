#!/usr/bin/env bash
# Generating from a GGUF and from its pack under one budget, with checksums and without: tokens/s and requests.
#
#   bench/pack-streaming.sh MODEL RAM [TOKENS] [REPEAT]
#
# RAM as for --ram; TOKENS (48) per run, REPEAT (3) alternating rounds. The pack is made in MODEL's folder and removed.
# FOREBAY names another forebay program. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3

model=$1 ram=$2 tokens=${3:-48} repeat=${4:-3}
folder=$(mktemp -d -p "$(dirname "$model")")
trap 'rm -rf "$folder"' EXIT
pack=$folder/model.fbay
"$FOREBAY" pack "$model" -o "$pack" 2>/dev/null
measure() {
    "$FOREBAY" bench "$@" --ram "$ram" --prompt-tokens 0 --gen-tokens "$tokens" --repeat 1 --json | python3 -c '
import json, sys
d = json.load(sys.stdin)
s, io = d["statistics"]["stream"], d["statistics"]["stream"]["io"]
blocks = max(1, s["experts_read"] + s["dense_blocks_read"])
print("%.2f | %.2f | %.1f | %.2f | %.0f" % (
    d["generate"]["tokens_per_second_median"], io["bytes_read"] / max(1e-9, io["busy_seconds"]) / 1e9,
    io["requests"] / blocks, io["bytes_read"] / max(1, io["bytes_requested"]),
    io["bytes_checked"] / 1e9 / io["check_seconds"] if io["check_seconds"] else 0))'
}
echo "| from | tokens/s | GB/s while reading | requests per block | read per byte wanted | checked GB/s |"
echo "| --- | --- | --- | --- | --- | --- |"
for ((i = 0; i < repeat; i++)); do
    echo "| GGUF | $(measure "$model") |"
    echo "| pack | $(measure "$pack") |"
    echo "| pack, --no-verify | $(measure "$pack" --no-verify) |"
done
