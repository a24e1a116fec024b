#!/usr/bin/env bash
# Does --vram hold, as reported by the driver, while a model is loaded, reads a prompt and generates?
#
#   bench/vram.sh MODEL BUDGET...
#
# For every BUDGET (such as 8GiB), the script searches for the longest context that it allows (256 positions, doubled up to
# CTX_MAX, 131072), so that little of it is left. Then it runs a prompt of PROMPT (512) tokens and generates GENERATE (4096) tokens,
# or as many as the context holds. Meanwhile it asks nvidia-smi every 20 ms how much VRAM is in use. VRAM that was in use before
# does not count.
# GPU=N chooses the GPU (0). Needs nvidia-smi. FOREBAY names another forebay program.
# Exit status 1 if a budget was exceeded, or too small for the model with any context.
. "$(dirname "$0")/common.sh" 2 "$@"
need nvidia-smi

model=$1
shift
gpu=${GPU:-0} prompt=${PROMPT:-512} generate=${GENERATE:-4096} most=${CTX_MAX:-131072}
work=$(mktemp -d)
watch=
trap '[ -z "$watch" ] || kill "$watch" 2>/dev/null; rm -rf "$work"' EXIT
failed=0

used() {
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i "$gpu"
}

# bench BUDGET CONTEXT PROMPT GENERATE: exit status of the program, words in $work/out and $work/err.
bench() {
    "$FOREBAY" bench "$model" --device "cuda:$gpu" --vram "$1" --ctx "$2" --prompt-tokens "$3" --gen-tokens "$4" --repeat 1 \
        >"$work/out" 2>"$work/err"
}

less() {
    echo $(($1 < $2 ? $1 : $2))
}

echo "| budget | context | by forebay's count | most in use, by the driver | share |"
echo "| --- | --- | --- | --- | --- |"
for budget; do
    context=0
    for ((try = 256; try <= most; try *= 2)); do
        bench "$budget" "$try" 1 1 || break
        context=$try
    done
    if [ "$context" = 0 ]; then
        echo "| $budget | refused: $(head -n 1 "$work/err") | | | |"
        failed=1
        continue
    fi
    before=$(used)
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i "$gpu" -lms 20 >"$work/used" &
    watch=$!
    status=0
    bench "$budget" "$context" "$(less "$prompt" "$context")" "$(less "$generate" "$context")" || status=$?
    kill "$watch"
    wait "$watch" 2>/dev/null || true
    watch=
    if [ "$status" != 0 ]; then
        echo "| $budget | $context | $(head -n 1 "$work/err") | | |"
        failed=1
        continue
    fi
    peak=$(sort -n "$work/used" | tail -n 1)
    count=$(sed -n 's/.*vram *\([0-9.]* [KMG]iB\) by our count.*/\1/p' "$work/out" "$work/err" | head -n 1)
    mib=$(numfmt --from=iec-i --suffix=B --to-unit=1048576 "$budget" | tr -d B)
    word=
    if ((peak - before > mib)); then
        word=" **exceeded**"
        failed=1
    fi
    echo "| $budget | $context | $count | $((peak - before)) MiB$word | $(((peak - before) * 100 / mib)) % |"
done
exit "$failed"
