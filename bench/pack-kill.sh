#!/usr/bin/env bash
# Kills `forebay pack` at random moments. A file under the final name must always be complete.
#
#   bench/pack-kill.sh MODEL [TIMES] [FOLDER]
#
# TIMES (20) kills are spread over the time that packing takes. The packs go to FOLDER (that of MODEL). One of the runs replaces
# an existing pack. FOREBAY names another forebay program.
. "$(dirname "$0")/common.sh" 1 "$@"

model=$1 times=${2:-20}
folder=$(mktemp -d -p "${3:-$(dirname "$model")}")
trap 'rm -rf "$folder"' EXIT
out=$folder/model.fbay
start=$(date +%s%N)
"$FOREBAY" pack "$model" -o "$out" 2>/dev/null
whole_us=$((($(date +%s%N) - start) / 1000))
sum=$(sha256sum <"$out")
rm "$out"

absent=0 whole=0
for ((i = 0; i < times; i++)); do
    # Slightly beyond the end, so that the last steps (fsync, rename) are hit too.
    sleep_us=$(((RANDOM * 32768 + RANDOM) % (whole_us + whole_us / 10)))
    "$FOREBAY" pack "$model" -o "$out" --force 2>/dev/null &
    child=$!
    sleep "$(printf '%d.%06d' $((sleep_us / 1000000)) $((sleep_us % 1000000)))"
    kill -KILL "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
    if [ -e "$out" ]; then
        if ! "$FOREBAY" verify "$out" 2>/dev/null || [ "$(sha256sum <"$out")" != "$sum" ]; then
            echo "FAILED: killed after $sleep_us us, the file under the final name is not whole" >&2
            exit 1
        fi
        whole=$((whole + 1))
        # From here on, an existing pack is replaced.
        [ "$whole" -gt 1 ] || continue
        rm "$out"
    else
        absent=$((absent + 1))
    fi
    rm -f "$folder"/.*.partial
done
echo "$times kills within $((whole_us / 1000)) ms: $absent times no file, $whole times a whole one, never anything else"
