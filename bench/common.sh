# shellcheck shell=bash
# What the scripts beside it begin with; to be sourced with the number of arguments that must be there, and the arguments:
#
#   . "$(dirname "$0")/common.sh" 1 "$@"
#
# Prints the head of the script as help if some are missing, and builds the program unless FOREBAY names one.
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

# More options for it, for scripts that say so.
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
