#!/usr/bin/env bash
# The server against llama-server with several clients on a GPU: alternating runs, ratios of one sitting.
#
#   bench/vs-llama-server.sh LLAMA_SERVER MODEL [TRACE]
#
# LLAMA_SERVER is llama.cpp's server, built with CUDA. MODEL is a GGUF file.
# With TRACE, forebay takes the experts that a recording says, because those of random weights have nothing in common.
# llama.cpp computes on the CPU what does not fit, so its speed does not depend on the experts.
# CLIENTS (64) clients send REQUESTS (2) requests each, with prompts of WORDS (16) words and answers of TOKENS (128) tokens.
# Each request has room for CONTEXT (512) tokens. PAIRS (2) runs of each program, every second pair in reverse order.
# VRAM=8GiB limits forebay, and CPU_LAYERS=31 leaves the experts of so many layers to llama.cpp's CPU, which is to need as much.
# FOREBAY names another forebay program. Needs python3 and nvidia-smi. Prints a Markdown table.
. "$(dirname "$0")/common.sh" 2 "$@"
need python3 nvidia-smi

llama_server=$1 model=$2 trace=${3:-}
clients=${CLIENTS:-64} requests=${REQUESTS:-2} words=${WORDS:-16} tokens=${TOKENS:-128} context=${CONTEXT:-512}
pairs=${PAIRS:-2} vram=${VRAM:-} cpu_layers=${CPU_LAYERS:-0} port=${PORT:-8199}
load="$(dirname "$0")/serve-load.py" address=http://127.0.0.1:$port
runs=$(mktemp) log=$(mktemp)
server=
trap 'kill $server 2>/dev/null || true; rm -f "$runs" "$log"' EXIT

# measure NAME PAIR PROGRAM...: starts the server, warms it up, and measures it.
measure() {
    local name=$1 pair=$2
    shift 2
    "$@" >"$log" 2>&1 &
    server=$!
    local waited=0
    until python3 -c "import urllib.request; urllib.request.urlopen('$address/health')" 2>/dev/null; do
        if ! kill -0 $server 2>/dev/null || ((++waited > 600)); then
            tail -n 20 "$log" >&2
            echo "$name does not answer" >&2
            exit 1
        fi
        sleep 0.2
    done
    "$load" "$address" --clients "$clients" --requests 1 --prompt "$words" --tokens 16 --from 2000 >/dev/null
    "$load" "$address" --clients "$clients" --requests "$requests" --prompt "$words" --tokens "$tokens" --json >"$runs.one"
    local used
    used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
    kill -INT $server
    wait $server || true
    server=
    python3 - "$name" "$pair" "$used" "$runs.one" <<'PYTHON' | tee -a "$runs"
import json, sys

name, pair, used, path = sys.argv[1:]
run = json.load(open(path))
times = [1e3 * run[key] for key in ("first_median", "first_p99", "gap_median", "gap_p99")]
print("\t".join([name, pair, f"{run['tokens_per_second']:.1f}"] + [f"{time:.1f}" for time in times] + [used]))
PYTHON
    rm -f "$runs.one"
}

run_forebay() {
    local -a more=()
    [ -z "$vram" ] || more+=(--vram "$vram")
    [ -z "$trace" ] || more+=(--routing-trace "$trace")
    # shellcheck disable=SC2086
    measure forebay "$1" "$FOREBAY" serve "$model" --device cuda --port "$port" --parallel "$clients" --ctx "$context" \
        "${more[@]}" $FOREBAY_FLAGS
}

run_llama() {
    measure llama-server "$1" "$llama_server" -m "$model" --port "$port" -ngl 99 -fa on -np "$clients" \
        -c $((clients * context)) --n-cpu-moe "$cpu_layers"
}

for ((pair = 0; pair < pairs; pair++)); do
    run_pair "$pair" "$pair"
done >&2

python3 - "$runs" "$clients" <<'PYTHON'
import collections, statistics, sys

rows = collections.defaultdict(list)
for line in open(sys.argv[1]):
    name, _, *numbers = line.split("\t")
    rows[name].append([float(number) for number in numbers])
print(f"{sys.argv[2]} clients; medians of the runs of each program")
print("| program | tokens/s | first token, ms | p99 | gap, ms | p99 | VRAM in use, MiB | tokens/s of each run |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for name, runs in rows.items():
    medians = [statistics.median(column) for column in zip(*runs)]
    each = " ".join(f"{run[0]:.0f}" for run in runs)
    print(f"| {name} | " + " | ".join(f"{number:.0f}" if number > 30 else f"{number:.1f}" for number in medians) + f" | {each} |")
ours, theirs = rows["forebay"], rows["llama-server"]
ratios = [a[0] / b[0] for a, b in zip(ours, theirs)]
print(f"\nratio of tokens/s: {statistics.median(ratios):.2f} (of each pair: " + " ".join(f"{ratio:.2f}" for ratio in ratios) + ")")
PYTHON
