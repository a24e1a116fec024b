#!/usr/bin/env bash
# Loading a folder of safetensors files into the GPU's memory: forebay and the peers, each in a process of its own, alternating.
#
#   bench/peers/load.sh FOLDER [ROUNDS] [PEER...]
#
# ROUNDS (3); peers: those of bench/peers/load.py whose packages are installed (pip install fastsafetensors==0.5.0
# runai-model-streamer==0.17.0 instanttensor==0.2.2 safetensors==0.9.0rc1). Every round loads each cold, dropped from the page
# cache before, and then warm. bench/peers/make_folder.py makes a folder. PYTHON names a Python that has torch, FOREBAY another
# forebay program. Prints a Markdown table.
. "$(dirname "$0")/../common.sh" 1 "$@"
need python3

folder=$1 rounds=${2:-3}
peers=("${@:3}")
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
if [ ${#peers[@]} -eq 0 ]; then
    for peer in safetensors:safetensors prefetch:safetensors fastsafetensors:fastsafetensors runai:runai_model_streamer instanttensor:instanttensor; do
        "$python" -c "import ${peer#*:}" 2>/dev/null && peers+=("${peer%:*}")
    done
fi
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

page_cache() { # drop or fill
    python3 - "$1" "$folder" <<'PYTHON'
import glob, os, sys
what, folder = sys.argv[1:]
for name in glob.glob(os.path.join(folder, "*.safetensors")):
    file = os.open(name, os.O_RDONLY)
    if what == "drop":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        while os.read(file, 1 << 24):
            pass
PYTHON
}

once() { # NAME STATE ROUND
    case $1 in
        forebay) "$FOREBAY" load "$folder" --device cuda --json 2>"$results/error" >"$results/$1.$2.$3" ;;
        *) "$python" "$here/load.py" "$1" "$folder" 2>"$results/error" | tail -n 1 >"$results/$1.$2.$3" ;;
    esac || {
        echo "$1, $2, round $3: failed" >&2
        tail -n 2 "$results/error" >&2
        rm -f "$results/$1.$2.$3"
    }
}

for ((round = 1; round <= rounds; round++)); do
    for state in cold warm; do
        for name in forebay "${peers[@]}"; do
            page_cache "$([ $state = cold ] && echo drop || echo fill)"
            echo "round $round, $state, $name" >&2
            once "$name" $state "$round"
        done
    done
done

python3 - "$results" forebay "${peers[@]}" <<'PYTHON'
import glob, json, statistics, sys

results, *names = sys.argv[1:]

def runs(name, state):
    found = []
    for path in glob.glob(f"{results}/{name}.{state}.*"):
        answer = json.load(open(path))
        found.append({**answer, **answer["runs"][0]} if name == "forebay" else answer)
    return found

rates = {}
print("| loader | cold GB/s | warm GB/s | peak resident MiB |")
print("| --- | --- | --- | --- |")
for name in names:
    cold, warm = runs(name, "cold"), runs(name, "warm")
    if not cold or not warm:
        print(f"| {name} | failed | failed | |")
        continue
    rates[name] = [statistics.median(run["bytes_per_second"] for run in state) / 1e9 for state in (cold, warm)]
    resident = max(run["peak_resident_bytes"] for run in cold + warm) / 2**20
    print(f"| {name} | {rates[name][0]:.2f} | {rates[name][1]:.2f} | {resident:.0f} |")
peers = [rates[name] for name in rates if name != "forebay"]
if "forebay" in rates and peers:
    ratios = [ours / max(peer[state] for peer in peers) for state, ours in enumerate(rates["forebay"])]
    print(f"\nforebay against the best peer: cold {ratios[0]:.2f}x, warm {ratios[1]:.2f}x (medians of {len(runs('forebay', 'cold'))} rounds)")
PYTHON
