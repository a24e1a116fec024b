#!/usr/bin/env bash
# Generating from a GGUF file and from its pack with one budget, with and without checksums: tokens/s, requests, ratios per round.
#
#   bench/pack-streaming.sh MODEL RAM [TOKENS] [REPEAT]
#
# RAM as for --ram; TOKENS (48) per run; REPEAT (4) rounds. Every second round runs in reverse order, because the first program may
# find a disk that has rested. The pack is written into MODEL's folder and removed.
# FOREBAY names another forebay program, FOREBAY_FLAGS adds options to it (such as --threads 8). Prints Markdown.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3

model=$1 ram=$2 tokens=${3:-48} repeat=${4:-4}
folder=$(mktemp -d -p "$(dirname "$model")")
trap 'rm -rf "$folder"' EXIT
pack=$folder/model.fbay
"$FOREBAY" pack "$model" -o "$pack" 2>/dev/null

# measure NAME ROUND MODEL [OPTION]...
measure() {
    local name=$1 round=$2
    shift 2
    "$FOREBAY" bench "$@" --device cpu --ram "$ram" --prompt-tokens 0 --gen-tokens "$tokens" --repeat 1 $FOREBAY_FLAGS --json \
        >"$folder/$name-$round.json"
}

for round in $(seq "$repeat"); do
    echo "round $round of $repeat" >&2
    order="gguf pack unverified"
    [ $((round % 2)) = 1 ] || order="unverified pack gguf"
    for name in $order; do
        case $name in
        gguf) measure gguf "$round" "$model" ;;
        pack) measure pack "$round" "$pack" ;;
        unverified) measure unverified "$round" "$pack" --no-verify ;;
        esac
    done
done

python3 - "$folder" "$repeat" <<'PYTHON'
import json, statistics, sys

folder, repeat = sys.argv[1], int(sys.argv[2])
names = {"gguf": "GGUF", "pack": "pack", "unverified": "pack, --no-verify"}
rates = {name: [] for name in names}
print("| round | from | tokens/s | GB/s while reading | requests per block | read per byte wanted | checked GB/s | of a token's time waited for checksums |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for round in range(1, repeat + 1):
    for name, words in names.items():
        report = json.load(open(f"{folder}/{name}-{round}.json"))
        stream = report["statistics"]["stream"]
        io = stream["io"]
        blocks = max(1, stream["experts_read"] + stream["dense_blocks_read"])
        rate = report["generate"]["tokens_per_second_median"]
        rates[name].append(rate)
        checked = io["bytes_checked"] / 1e9 / io["check_seconds"] if io["check_seconds"] else 0
        print(f"| {round} | {words} | {rate:.2f} | {io['bytes_read'] / max(1e-9, io['busy_seconds']) / 1e9:.2f} | "
              f"{io['requests'] / blocks:.1f} | {io['bytes_read'] / max(1, io['bytes_requested']):.2f} | {checked:.0f} | "
              f"{io['check_wait_seconds'] * rate / report['generate']['tokens']:.1%} |")
print()

def ratio(one, other):
    shares = [a / b for a, b in zip(rates[one], rates[other])]
    print(f"{names[one]} / {names[other]}, tokens/s, round by round: {', '.join(f'{share:.2f}' for share in shares)}; "
          f"median {statistics.median(shares):.2f}")

ratio("pack", "gguf")
ratio("unverified", "gguf")
ratio("pack", "unverified")
PYTHON
