#!/usr/bin/env bash
# `forebay pack` on a full disk and on a read-only disk: it must give a clear error at once and leave nothing behind.
#
#   bench/pack-disk.sh MODEL
#
# Needs root (mounts two tmpfs). FOREBAY names another forebay program.
. "$(dirname "$0")/common.sh" 1 "$@"

model=$1
if [ "$(id -u)" != 0 ]; then
    echo "SKIPPED: this needs root, it mounts file systems" >&2
    exit 0
fi
folder=$(mktemp -d)
trap 'umount "$folder/small" "$folder/fixed" 2>/dev/null || true; rm -rf "$folder"' EXIT
mkdir "$folder/small" "$folder/fixed"
mount -t tmpfs -o size=8M tmpfs "$folder/small"
mount -t tmpfs -o size=8M,ro tmpfs "$folder/fixed"
for place in small fixed; do
    status=0
    said=$("$FOREBAY" pack "$model" -o "$folder/$place/model.fbay" 2>&1) || status=$?
    echo "$place: exit status $status: $said"
    if [ "$status" != 1 ] || [ -n "$(ls -A "$folder/$place")" ]; then
        echo "FAILED: a clean failure was expected" >&2
        exit 1
    fi
done
