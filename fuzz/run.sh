#!/usr/bin/env bash
# Fuzzes one target for a while: fuzz/run.sh TARGET SECONDS [LIBFUZZER OPTIONS...]
# Builds all targets, to fuzz several at the same time later: fuzz/run.sh --build
#
# Works with stable Rust and a C++ compiler: the coverage instrumentation consists of stable compiler flags. Only the
# sanitizers need nightly, and without unsafe code in these crates they would find little. Panics (overflow
# checks included), hangs over ten seconds and allocations beyond the input's size + 64 MiB are findings. README.md says
# which limits templates have.
set -euo pipefail

# FUZZ_PROFILE names another profile of fuzz/Cargo.toml.
profile=${FUZZ_PROFILE:-release}
host=$(rustc -vV | sed -n 's/^host: //p')
build() {
    # Naming the host as target keeps build scripts and procedural macros without instrumentation.
    RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares" \
        cargo build --locked --profile "$profile" --target "$host" "$@"
}

if [ "$*" = --build ]; then
    cd "$(dirname "$0")"
    build --bins
    exit
fi
if [ $# -lt 2 ]; then
    echo "usage: fuzz/run.sh TARGET SECONDS [LIBFUZZER OPTIONS...] | fuzz/run.sh --build" >&2
    echo "targets: codec codecs gguf safetensors_header pack tokenizer_metadata template routing_trace" >&2
    exit 2
fi
target=$1
seconds=$2
shift 2
cd "$(dirname "$0")"
if [ ! -f "targets/$target.rs" ]; then
    echo "no target is called $target; see fuzz/targets" >&2
    exit 2
fi

build --bin "$target"

mkdir -p "corpus/$target" "artifacts/$target"
seeds=("seeds/$target")
if [ "$target" = template ]; then
    for folder in ../../shared/fixtures/templates ../fixtures/templates; do
        if [ -d "$folder" ]; then
            seeds+=("$folder")
            break
        fi
    done
fi
# A template runs four times. Each run may take the ten seconds that the program gives it.
timeout=10
if [ "$target" = template ]; then
    timeout=60
fi
exec "${CARGO_TARGET_DIR:-target}/$host/$profile/$target" "corpus/$target" "${seeds[@]}" \
    -artifact_prefix="artifacts/$target/" -max_total_time="$seconds" \
    -timeout="$timeout" -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1 "$@"
