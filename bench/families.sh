#!/usr/bin/env bash
# gpt-oss, DeepSeek and Gemma 3 shapes on one GPU: speed against llama.cpp, predictions, and the VRAM of the KV cache.
#
#   bench/families.sh LLAMA_BENCH OUT
#
# LLAMA_BENCH is the llama-bench program, built with CUDA. The script prints a line or two per row, and the seconds of each step.
# Tables and errors are appended to OUT/families.txt. A step that fails says so, and the next one begins.
# FAMILIES_STEPS names the steps and their order (resident,beyond,kv,v3):
#
#   resident  gpt-oss-20b (MXFP4) and deepseek-v2-lite (Q4_K_M) in VRAM: PROMPT (512) tokens, GENERATE (128) tokens
#   beyond    the same with --vram 8GiB and 4GiB, also with uniform random routing, after `forebay doctor` for the models' folder.
#             llama.cpp gets the smallest -ncmoe that stays within the budget
#   kv        VRAM with a short and a long context, as reported by the driver: bytes per position of deepseek-v3, gpt-oss-20b
#             and gemma3-4b
#   v3        deepseek-v3 with V3_LAYERS (8) layers, cold, with --vram 8GiB and RAM (32GiB) limited by a control group (needs
#             root): measured rates beside those predicted for the same routing, after `forebay doctor`
#
# Each row has PAIRS (2) alternating pairs. STEP_LIMIT (240) seconds end a part that hangs.
# Models are made on first use: those that fit in VRAM in MEMORY (/dev/shm, 28 GB), that of `v3` in WORK
# (/var/tmp/forebay-families, 36 GB), which should be on a disk. KEEP=1 keeps them for the next call.
# TRIAL=1 uses tiny shapes, to try the script on an emulated GPU.
# Needs python3 and nvidia-smi. FOREBAY names another forebay program.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3 nvidia-smi
. "$root/bench/limits.sh"

llama_bench=$1 out=$2
work=${WORK:-/var/tmp/forebay-families} memory=${MEMORY:-/dev/shm} ram=${RAM:-32GiB} layers=${V3_LAYERS:-8}
step_limit=${STEP_LIMIT:-240} prompt=${PROMPT:-512} generate=${GENERATE:-128} pairs=${PAIRS:-2}
gpt_oss=gpt-oss-20b gpt_oss_vram=8GiB lite=deepseek-v2-lite lite_vram=4GiB v3=deepseek-v3 v3_vram=8GiB gemma=gemma3-4b
latent=576 contexts=(8192 131072) memory_bytes=28000000000
if [ -n "${TRIAL:-}" ]; then
    gpt_oss=gpt-oss-tiny gpt_oss_vram=${TRIAL_VRAM:-70MiB} lite=deepseek-v3-tiny lite_vram=$gpt_oss_vram v3=deepseek-v3-tiny
    v3_vram=$gpt_oss_vram gemma=gemma3-tiny layers=4 latent=288 contexts=(1024 66560) memory_bytes=100000000
fi
mkdir -p "$out" "$work"
raw=$out/families.txt step=
# The profile belongs to this sitting; the next call with the same WORK finds it there.
export FOREBAY XDG_CONFIG_HOME=$work/config
clear_up() {
    [ -z "$step" ] || kill "$step" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -f "$memory"/families-*.gguf "$work"/families-*.gguf
}
trap clear_up EXIT
trap 'exit 130' INT TERM
# Descriptor 3 is for lines to the caller, even where standard output is redirected.
exec 3>&1

# say WORDS: prints a line for the caller and adds it to the record.
say() {
    echo "$*" >&3
    echo "$*" >>"$raw"
}

# tell PREFIX FILE: adds the table in FILE to the record and prints its rows for the caller.
tell() {
    local row
    cat "$2"
    grep '^| ' "$2" | tail -n +3 | while IFS= read -r row; do
        say "$1: $row"
    done
}

# model FOLDER SHAPE [OPTION...]: sets `file` to a model of that shape and makes the model if it is missing.
model() {
    local folder=$1
    shift
    local name=$*
    name=${name// /-}
    file=$folder/families-${name//--/}.gguf
    [ -e "$file" ] || timeout "$step_limit" "$FOREBAY" synth "$1" "$file" "${@:2}" >"$out/synth" 2>&1 || {
        cat "$out/synth" >&2
        return 1
    }
    [ ! -e "$out/synth" ] || say "$(tail -n 1 "$out/synth")"
    rm -f "$out/synth"
}

# profile FOLDER: runs `forebay doctor` for this machine and the disk of $file in FOLDER, unless there is a profile.
profile() {
    "$FOREBAY" plan "$file" --device cuda >/dev/null 2>&1 || timeout "$step_limit" "$FOREBAY" doctor "$1"
}

# bench NAME [OPTION...]: runs $file and writes the JSON to $out/NAME.json.
bench() {
    local name=$1
    shift
    timeout "$step_limit" "${within[@]}" "$FOREBAY" bench "$file" --device cuda --repeat 1 "$@" --json >"$out/$name.json"
}

# part COMMAND...: continues if it fails. It runs in the background, where the first failing command ends it; in an `if` it
# would not end.
part() {
    "$@" &
    wait $! || say "$*: FAILED, $raw ends with: $(grep -v FAILED "$raw" | tail -n 1)"
}

step_resident() {
    part resident "$gpt_oss"
    part resident "$lite"
}

# resident SHAPE
resident() {
    model "$memory" "$1"
    PAIRS=$pairs REPEAT=2 PROMPT=$prompt GENERATE=$generate DEPTH=0 timeout "$step_limit" \
        "$root/bench/vs-llama-gpu.sh" "$llama_bench" "$file" >"$out/table"
    tell resident "$out/table"
}

step_beyond() {
    part beyond "$gpt_oss" "$gpt_oss_vram"
    part beyond "$lite" "$lite_vram"
}

# beyond SHAPE VRAM
beyond() {
    model "$memory" "$1"
    profile "$memory" || say "$1: doctor failed, so forebay goes by usual rates"
    VRAM=$2 PAIRS=$pairs PROMPTS=$prompt GENERATE=$generate LIMIT=60 timeout "$step_limit" \
        "$root/bench/beyond-vram.sh" "$llama_bench" "$file" >"$out/table"
    tell "$1, $2" "$out/table"
}

step_kv() {
    part context_in_vram $((latent * 3 * 2)) "$v3" --layers 3
    part context_in_vram "" "$gpt_oss"
    part context_in_vram "" "$gemma"
}

# context_in_vram BYTES SHAPE [OPTION...]: VRAM per position of context as reported by the driver, beside BYTES. If BYTES is empty,
# the expected value is what inspect says of the layers that keep all positions.
context_in_vram() {
    local context line bytes=$1
    shift
    model "$memory" "$@"
    for context in "${contexts[@]}"; do
        bench "context-$context" --ctx "$context" --prompt-tokens 1 --gen-tokens 1
    done
    "$FOREBAY" inspect "$file" --json >"$out/inspect.json"
    line=$(
        python3 - "$out" "$(basename "$file")" "${contexts[@]}" "$bytes" <<'PYTHON'
import json, sys
out, name, short, long, said = sys.argv[1:]
model = json.load(open(f"{out}/inspect.json"))
vram = [json.load(open(f"{out}/context-{context}.json"))["statistics"]["vram"] for context in (short, long)]
positions = int(long) - int(short)
grown = lambda key: (vram[1][key] - vram[0][key]) / positions
all_layers = model["kv_bytes_per_position"]
expected = int(said) if said else model["kv_bytes_per_position_kept"]
driver, tables = grown("driver_used_bytes"), grown("activation_bytes")
cache = driver - tables
print(f"{name}: from {short} to {long} positions the driver says {driver:.0f} bytes for each; without the {tables:.0f} of tables for rotation "
      f"{cache:.0f}, expected {expected:.0f}: {cache / expected:.3f} of that, {cache / all_layers:.3f} of all layers' context; our own count "
      f"of the cache {grown('kv_cache_bytes'):.0f}; {vram[1]['driver_used_bytes'] / 2**20:.0f} MiB in use")
PYTHON
    )
    say "$line"
}

step_v3() {
    trap unlimit_memory EXIT
    local budget=()
    model "$work" "$v3" --layers "$layers"
    plan=("$FOREBAY" plan "$file" --device cuda --vram "$v3_vram" --ctx "$((prompt > generate ? prompt : generate))")
    profile "$work" || say "v3: doctor failed, so there are no predictions"
    drop_caches
    if ! limit_memory "$(bytes "$ram")"; then
        say "v3: no control group limits memory here, so --ram $ram instead"
        budget=(--ram "$ram")
    fi
    "${within[@]}" "${plan[@]}" "${budget[@]}" || true
    # The run records its routing, so that the prediction is for this routing.
    rm -f "$out/v3.route"
    against_prediction "own routing" "${budget[@]}" --prompt-tokens "$prompt" --gen-tokens "$generate" --trace-routing "$out/v3.route"
    against_prediction "uniform routing" "${budget[@]}" --prompt-tokens 0 --gen-tokens "$generate" --routing-trace uniform
}

# against_prediction ROW [OPTION...]
against_prediction() {
    local row=$1 line
    shift
    bench v3 --vram "$v3_vram" "$@"
    line=$(
        python3 - "$out/v3.json" "$v3, $layers layers, $v3_vram of VRAM, $ram of RAM, $row" <<'PYTHON'
import json, sys
run, row = json.load(open(sys.argv[1])), sys.argv[2]
statistics = run["statistics"]
parts = []
for part in ("prompt", "generate"):
    if run[part]:
        rate, predicted = run[part]["tokens_per_second_median"], run[part]["tokens_per_second_predicted"]
        beside = f"predicted {predicted:.2f} ({predicted / rate:.2f} times that)" if predicted else "no prediction"
        parts.append(f"{part} {rate:.2f} tokens/s, {beside}")
experts, stream = statistics.get("device_experts"), statistics.get("stream")
if experts:
    parts.append(f"{experts['hit_rate']:.0%} hits in VRAM, {experts['experts_on_cpu'] / max(1, experts['misses']):.0%} of misses on the CPU")
if stream:
    parts.append(f"{stream['experts_read']} experts read, disk busy {stream['io']['busy_fraction']:.0%}")
print(f"{row}: {'; '.join(parts)}")
PYTHON
    )
    say "$line"
}

if [ "$(df --block-size=1 --output=avail "$memory" | tail -n 1)" -lt "$memory_bytes" ]; then
    say "$memory has no room for the models that fit VRAM: they go to $work, and the first load of each is cold"
    memory=$work
fi
for name in $(tr , ' ' <<<"${FAMILIES_STEPS:-resident,beyond,kv,v3}"); do
    started=$SECONDS
    printf '\n== %s\n' "$name" >>"$raw"
    # In the background, like parts.
    "step_$name" >>"$raw" 2>&1 &
    step=$!
    if wait "$step"; then
        say "$name: done after $((SECONDS - started)) s"
    else
        say "$name: FAILED after $((SECONDS - started)) s, $raw ends with: $(grep -v FAILED "$raw" | tail -n 1)"
    fi
    step=
done
