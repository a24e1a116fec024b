#!/usr/bin/env bash
# Checks kernels, models and the command line on a machine with an NVIDIA GPU, and prints a table.
#
#   bench/gpu-check.sh FIXTURES
#
# FIXTURES is the folder of reference data (gguf/, models/). The script builds the programs if cargo is there. Otherwise FOREBAY,
# GPU_CHECK and LIBRARY (libforebay.so) name them. LIBRARY is checked if python3 has torch and safetensors, the package forebay if it is there.
# GPU=N chooses the GPU (0). SANITIZE=1 also runs all models under compute-sanitizer, which takes much longer.
# Exit status 1 if any check failed.
set -uo pipefail

if [ $# -ne 1 ]; then
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
fixtures=$1
gpu=${GPU:-0}
root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${FOREBAY:-}" ] || [ -z "${GPU_CHECK:-}" ]; then
    if ! command -v cargo >/dev/null; then
        echo "gpu-check.sh: there is no cargo: build elsewhere and name the programs in FOREBAY and GPU_CHECK" >&2
        exit 1
    fi
    (cd "$root" && cargo build --release --quiet --package forebay --package forebay-gpu-check --package forebay-c) || exit 1
    built=${CARGO_TARGET_DIR:-$root/target}/release
    FOREBAY=${FOREBAY:-$built/forebay}
    GPU_CHECK=${GPU_CHECK:-$built/gpu-check}
    LIBRARY=${LIBRARY:-$built/libforebay.so}
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
table=() failed=0

# check NAME COMMAND...: runs it and notes whether it succeeded.
check() {
    local name=$1 word=pass
    shift
    echo "== $name"
    if ! "$@"; then
        word=FAIL
        failed=1
    fi
    table+=("$(printf '%-4s  %s' "$word" "$name")")
}

# skip NAME WHY: notes that a check was skipped.
skip() {
    echo "== $1: SKIPPED, because $2" >&2
    table+=("$(printf '%-4s  %s' SKIP "$1: $2")")
}

# refused STATUS WORDS COMMAND...: the command must end with this status and print these words.
refused() {
    local status=$1 words=$2 got=0
    shift 2
    "$@" >"$work/out" 2>"$work/err" || got=$?
    cat "$work/err"
    [ "$got" = "$status" ] && grep -q -- "$words" "$work/err"
}

# same A B [MODEL]: the logits of two runs, with options A and B, must be equal files. The second run uses MODEL, if given.
same() {
    local a=$1 b=$2 second=${3:-$model}
    rm -f "$work/a" "$work/b"
    # Options are split into words on purpose.
    # shellcheck disable=SC2086
    "$FOREBAY" logits "$model" --tokens 1,2,3,4,5,6,7,8,9,10,11,12 -o "$work/a" $a &&
        "$FOREBAY" logits "$second" --tokens 1,2,3,4,5,6,7,8,9,10,11,12 -o "$work/b" $b &&
        cmp "$work/a" "$work/b"
}

model=$(find "$fixtures/gguf/qwen3_moe" -name '*Q8_0.gguf' | head -n 1)
run=("$FOREBAY" run "$model" --raw --prompt "one two three" --max-tokens 8 --temperature 0)
cuda=cuda:$gpu

mixture=()
[ -f "$root/models/tales-moe-sticky-Q4_K_M.gguf" ] && mixture=(--mixture "$root/models/tales-moe-sticky-Q4_K_M.gguf")
[ ${#mixture[@]} -gt 0 ] || skip "passes in two lanes" "the demo model is not in models/"
check "kernels and models" "$GPU_CHECK" --gpu "$gpu" --models "$fixtures" "${mixture[@]}"
check "run --device $cuda" "${run[@]}" --device "$cuda" --stats
check "run --device auto" "${run[@]}"
check "bench --device $cuda" "$FOREBAY" bench "$model" --device "$cuda" --prompt-tokens 32 --gen-tokens 16 --repeat 2
check "logits twice" same "--device $cuda" "--device $cuda"
check "logits by two readers" same "--device $cuda --exact" "--device $cuda --exact --io pread"
check "pack" "$FOREBAY" pack "$model" -o "$work/model.fbay"
check "logits of the pack" same "--device $cuda" "--device $cuda" "$work/model.fbay"
truncate -s -4096 "$work/model.fbay"
check "a truncated pack is refused" refused 1 "error:" "$FOREBAY" logits "$work/model.fbay" --tokens 1 -o "$work/c" --device "$cuda"
check "a small --vram is refused" refused 1 "of VRAM, but 16.00 MiB may be used" "${run[@]}" --device "$cuda" --vram 16MiB
check "--vram 1GiB holds" env GPU="$gpu" FOREBAY="$FOREBAY" "$root/bench/vram.sh" "$model" 1GiB
check "--threads on a GPU is refused" refused 2 "--threads" "${run[@]}" --device "$cuda" --threads 1
check "a GPU that is not there is refused" refused 1 "there is no GPU" "${run[@]}" --device cuda:99
check "no visible GPU is refused" refused 1 "finds no GPU" env CUDA_VISIBLE_DEVICES= "${run[@]}" --device "$cuda"
if [ -n "${SANITIZE:-}" ]; then
    for tool in memcheck racecheck; do
        check "compute-sanitizer $tool, models" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$GPU_CHECK" --gpu "$gpu" --models "$fixtures" --only "model"
    done
fi

if [ ! -f "${LIBRARY:-}" ]; then
    skip "tensors for PyTorch" "LIBRARY names no libforebay.so"
elif ! python3 -c 'import torch, safetensors; assert torch.cuda.is_available()' 2>/dev/null; then
    skip "tensors for PyTorch" "python3 has no torch with CUDA, or no safetensors"
else
    check "tensors for PyTorch" python3 "$root/bench/dlpack.py" "$LIBRARY" --device "$cuda"
    check "tensors for PyTorch in host memory" python3 "$root/bench/dlpack.py" "$LIBRARY" --device cpu
fi
if python3 -c 'import forebay, pytest, torch; assert torch.cuda.is_available()' 2>/dev/null; then
    check "modules of PyTorch" python3 -m pytest -q -p no:cacheprovider "$root/python/tests/test_modules.py"
else
    skip "modules of PyTorch" "python3 has no forebay, no pytest, or no torch with CUDA"
fi

echo
printf '%s\n' "${table[@]}"
exit "$failed"
