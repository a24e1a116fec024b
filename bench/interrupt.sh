#!/usr/bin/env bash
# How soon each long command ends after Ctrl-C, with which status, and what it leaves behind.
#
#   bench/interrupt.sh FOLDER [MODEL]
#
# FOLDER is on the disk to test and needs room for two models. Without MODEL, a synthetic llama-1b in Q8_0 (1.2 GiB) is
# made there. Every command gets SIGINT after some seconds (WAIT, 4 by default) and must end with status 130. The
# `prompt` rows are a prompt of 20,000 tokens with a budget of 600 MiB (RAM=600MiB).
. "$(dirname "$0")/common.sh" 1 "$@"
need python3

folder=$(mkdir -p "$1" && cd "$1" && pwd)
model=${2:-$folder/interrupt-llama-1b.gguf}
wait=${WAIT:-4} ram=${RAM:-600MiB}
work=$(mktemp -d "$folder/interrupt.XXXXXX")
trap 'rm -rf "$work"' EXIT

[ -e "$model" ] || "$FOREBAY" synth llama-1b "$model" --quantisation Q8_0
# As many words as make 20,000 tokens, whatever the tokenizer.
words='Once upon a time '
python3 -c 'import sys; print(sys.argv[1] * 1000)' "$words" >"$work/words.txt"
tokens=$("$FOREBAY" tokenize "$model" --json <"$work/words.txt" | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["ids"]))')
python3 -c 'import sys; print(sys.argv[1] * (20000 * 1000 // int(sys.argv[2])))' "$words" "$tokens" >"$work/long.txt"
mkdir "$work/out"

failures=0
printf '%-12s %8s %8s %10s  %s\n' command 'after s' status 'ends in s' 'JSON end, left behind'

# row NAME SECONDS INPUT ARGUMENT...: runs forebay, interrupts it, prints a line.
row() {
    local name=$1 after=$2 input=$3 id began took status end left
    shift 3
    "$FOREBAY" "$@" <"$input" >"$work/stdout" 2>"$work/stderr" &
    id=$!
    sleep "$after"
    if ! kill -INT "$id" 2>/dev/null; then
        echo "$name ended before its signal: $(tail -1 "$work/stderr")"
        failures=$((failures + 1))
        return
    fi
    began=$(date +%s%N)
    status=0
    wait "$id" || status=$?
    took=$((($(date +%s%N) - began) / 1000000))
    end=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["end"])' "$work/stdout" 2>/dev/null) || end=none
    left=$(ls -A "$work/out")
    rm -rf "${work:?}/out/"*
    printf '%-12s %8s %8s %6d.%03d  %s, %s\n' "$name" "$after" "$status" $((took / 1000)) $((took % 1000)) "$end" "${left:-nothing}"
    if [ "$status" != 130 ] || [ "$end" != interrupted ] || [ -n "$left" ]; then
        failures=$((failures + 1))
    fi
}

none=/dev/null
prompt=(run "$model" --raw --ctx 32768 --ram "$ram" --max-tokens 1 --json)
for after in "$wait" $((wait * 3)) $((wait * 8)); do
    row prompt "$after" "$work/long.txt" "${prompt[@]}"
done
row 'load' 1 $none load "$model" --repeat 1000 --json
row opening 0.3 "$work/long.txt" "${prompt[@]}"
row answer "$wait" $none run "$model" --raw --prompt Once --ram "$ram" --ctx 32768 --max-tokens 20000 --json
row bench "$wait" $none bench "$model" --ram "$ram" --prompt-tokens 20000 --gen-tokens 0 --json
row logits "$wait" $none logits "$model" --tokens "$(seq -s, 1 4000)" --ram "$ram" -o "$work/out/l.safetensors" --json
row synth 1 $none synth llama-8b "$work/out/s.gguf" --json
row pack 1 $none pack "$model" -o "$work/out/p.fbay" --json
"$FOREBAY" pack "$model" -o "$work/whole.fbay" 2>/dev/null
row verify 0.3 $none verify "$work/whole.fbay" --json
row doctor "$wait" $none doctor "$folder" --file "$model" --no-save --json
row 'doctor file' 1 $none doctor "$work/out" --no-save --json
demo=$root/models/tales-moe-sticky-Q4_K_M.gguf
row assess "$wait" $none assess "$demo" --tokens 900 --ctx 1024 -o "$work/out/a.html" --json
"$FOREBAY" bench "$demo" --gen-tokens 1000 --prompt-tokens 0 --repeat 9 --trace-routing "$work/trace" --json >/dev/null 2>&1
row replay 0.5 $none replay "$work/trace" --json
[ "$failures" = 0 ] || { echo "$failures rows are not as they should be" >&2; exit 1; }
