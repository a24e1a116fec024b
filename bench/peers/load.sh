#!/usr/bin/env bash
# Loading a folder of safetensors files into VRAM: forebay and the peers, each in a process of its own, alternating.
#
#   bench/peers/load.sh FOLDER [ROUNDS] [PEER...]
#
# ROUNDS (3). PEER: those of bench/peers/load.py whose packages are installed (pip install fastsafetensors==0.5.0
# runai-model-streamer==0.17.0 instanttensor==0.2.2 safetensors==0.9.0rc1). bench/peers/make_folder.py makes a folder.
# Every round loads with each peer cold (dropped from the page cache before), then with each peer warm. Every second round runs in
# reverse order.
#
# Rates are bytes of weights over the seconds from opening the files to having everything on the GPU. They include pinning and
# allocating, but not the creation of the CUDA context. forebay's leave out reading the headers, some milliseconds.
# "Host memory" is the machine's peak memory use beyond the page cache, less what was in use before. It includes the process, its
# context and pinned memory.
#
# PYTHON names a Python that has torch and the packages, FOREBAY another forebay program, RAW a file for every answer as a line of
# JSON. LIMIT=SECONDS starts no load later than that. NO_PROGRAM=1 leaves the program out. STATES=warm or
# STATES=cold measures one of the two only. Prints a Markdown table.
# The peer forebay_python is our own package for Python (pip install ./python).
. "$(dirname "$0")/../common.sh" 1 "$@"
python=${PYTHON:-python3}
need "$python"

PYTHON=$python "$python" "$(dirname "$0")/compare.py" "$FOREBAY" "$1" "${2:-3}" "${@:3}"
