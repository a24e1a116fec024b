#!/usr/bin/env bash
# Loading a folder of safetensors files into the GPU's memory: forebay and the peers, each in a process of its own, alternating.
#
#   bench/peers/load.sh FOLDER [ROUNDS] [PEER...]
#
# ROUNDS (3); peers: those of bench/peers/load.py whose packages are installed (pip install fastsafetensors==0.5.0
# runai-model-streamer==0.17.0 instanttensor==0.2.2 safetensors==0.9.0rc1). Every round loads with each cold, dropped from the
# page cache before, then with each warm; every second round in reverse order. bench/peers/make_folder.py makes a folder.
# Rates are of bytes of weights and the seconds from opening files to having all on the GPU, with pinning and allocating but
# without making the CUDA context; forebay's leave out reading the headers, some milliseconds. "Host memory" is what the
# machine had in use at most beyond the page cache, less what it had before, so with the process, its context and pinned memory.
# PYTHON names a Python that has torch and the packages, FOREBAY another forebay program, RAW a file for every answer as a line
# of JSON; LIMIT=SECONDS begins no load later than that. Prints a Markdown table.
. "$(dirname "$0")/../common.sh" 1 "$@"
python=${PYTHON:-python3}
need "$python"

PYTHON=$python "$python" "$(dirname "$0")/compare.py" "$FOREBAY" "$1" "${2:-3}" "${@:3}"
