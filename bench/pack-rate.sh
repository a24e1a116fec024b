#!/usr/bin/env bash
# Speed of `forebay pack` and `forebay verify`, against the disk in the same run.
#
#   bench/pack-rate.sh MODEL [FOLDER] [REPEAT]
#
# FOLDER (that of MODEL) receives the pack and a scratch file of the same size for fio. These alternate REPEAT (3) times: fio
# reading the model, fio writing, fio doing both at once (what a copy on one disk does), pack, verify. Reads and writes are direct,
# so the page cache has no influence.
# Needs fio. FOREBAY names another forebay program. Prints a Markdown table in GB/s.
. "$(dirname "$0")/common.sh" 1 "$@"
need fio python3

model=$1 repeat=${3:-3}
folder=$(mktemp -d -p "${2:-$(dirname "$model")}")
trap 'rm -rf "$folder"' EXIT
bytes=$(stat -c %s "$model")
size=$((bytes < 3000000000 ? bytes / 4194304 * 4194304 : 3000 * 1048576))
common="--ioengine=io_uring --direct=1 --size=$size --output-format=terse"
fio_read() { # shellcheck disable=SC2086
    fio --name=r --filename="$model" --rw=read --bs=512k --iodepth=32 --readonly $common | awk -F';' '{printf "%.2f", $7 * 1024 / 1e9}'
}
fio_write() { # shellcheck disable=SC2086
    fio --name=w --filename="$folder/scratch" --rw=write --bs=4M --iodepth=4 --end_fsync=1 $common | awk -F';' '{printf "%.2f", $48 * 1024 / 1e9}'
    rm -f "$folder/scratch"
}
rate() { python3 -c 'import json,sys; print("%.2f" % (json.load(sys.stdin)["bytes_per_second"] / 1e9), end="")'; }

echo "| fio read | fio write | both: read | both: write | pack | verify |"
echo "| --- | --- | --- | --- | --- | --- |"
for ((i = 0; i < repeat; i++)); do
    r=$(fio_read)
    w=$(fio_write)
    fio_read >"$folder/both" &
    bw=$(fio_write)
    wait $!
    br=$(cat "$folder/both")
    p=$("$FOREBAY" pack "$model" -o "$folder/model.fbay" --force --json | rate)
    v=$("$FOREBAY" verify "$folder/model.fbay" --json | rate)
    echo "| $r | $w | $br | $bw | $p | $v |"
done
