#!/usr/bin/env bash
# Sessions at tight budgets on a disk that fails, against resident ones, for MINUTES: a wrong token, an unclear error or anything that grows
# ends it with status 1.
#
#   bench/soak.sh MINUTES [OPTION...] MODEL...
#
# MODEL is a GGUF file or a folder, with experts or dense; a pack of each is used, too. Options are those of the program: --device cuda,
# --threads N, --seed N, --json. SOAK names another program, to be run as `SOAK="cargo xtask emulate target/release/soak"`.
# The allocator gives memory back at once here, so that what is resident is what is in use, and a leak shows in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
    sed -n '2,9p' "$0" | cut -c3- >&2
    exit 2
fi
minutes=$1
shift
if [ -z "${SOAK:-}" ]; then
    cargo build --release -p forebay-gpu-check --bin soak
    SOAK=${CARGO_TARGET_DIR:-target}/release/soak
fi
export MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 MALLOC_ARENA_MAX=2
exec $SOAK --minutes "$minutes" "$@"
