# shellcheck shell=bash
# The beginning of every benchmark script. Source it with the number of required arguments, followed by the arguments:
#
#   . "$(dirname "$0")/common.sh" 1 "$@"
#
# If arguments are missing, it prints the head of the script as help. It builds the program unless FOREBAY names one.
set -euo pipefail

if [ $(($# - 1)) -lt "$1" ]; then
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${FOREBAY:-}" ]; then
    (cd "$root" && cargo build --release --quiet --package forebay)
    FOREBAY=${CARGO_TARGET_DIR:-$root/target}/release/forebay
fi

# More options for forebay, used by the scripts whose help mentions it.
FOREBAY_FLAGS=${FOREBAY_FLAGS:-}

# Ends the script unless all these programs are there: need PROGRAM...
need() {
    local program
    for program; do
        command -v "$program" >/dev/null && continue
        echo "$(basename "$0") needs $program: install it first" >&2
        exit 1
    done
}

# run_pair PAIR ARGUMENT...: calls run_forebay and run_llama with the arguments, in reverse order for every second pair.
run_pair() {
    local pair=$1
    shift
    if ((pair % 2 == 0)); then
        run_forebay "$@"
        run_llama "$@"
    else
        run_llama "$@"
        run_forebay "$@"
    fi
}
