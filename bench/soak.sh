#!/usr/bin/env bash
# Compares sessions with tight budgets on a failing disk with resident sessions, for MINUTES. A wrong token, an unclear error or
# anything that grows ends it with status 1.
#
#   bench/soak.sh MINUTES [OPTION...] MODEL...
#
# MODEL is a GGUF file or a folder, with experts or dense. A pack of each is tested too. Options are those of the program:
# --device cuda, --threads N, --seed N, --json. SOAK names another program, such as
# SOAK="cargo xtask emulate target/release/soak".
# The allocator gives memory back at once here. Resident memory is then memory in use, and a leak shows within minutes.
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
