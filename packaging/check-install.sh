#!/usr/bin/env bash
# Installs a release as a user would: packaging/check-install.sh DIR, the folder that `cargo xtask dist` has made.
# A local server has the files. Damaged, missing and foreign files must be refused, and nothing of them installed.
set -euo pipefail
files=$(cd "$1" && pwd)
# The demo model must be found beside the program, not in a checkout.
cd /
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cp -r "$files" "$work/served"

(cd "$work/served" && exec python3 -c '
import http.server
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, file=open("../port", "w"), flush=True)
server.serve_forever()') 2>/dev/null &
server=$!
while [ ! -s "$work/port" ]; do sleep 0.05; done
place=http://127.0.0.1:$(cat "$work/port")

failed=0
check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        echo "ok      $name"
    else
        echo "FAILED  $name"
        sed 's/^/        /' "$work/log"
        failed=1
    fi
}
# Runs the installer with an empty environment.
install() { env -i PATH="$PATH" HOME="$work/home" sh "$work/served/install.sh" --from "${FROM:-$place}" "$@"; }
refused() { # STATUS TEXT COMMAND...
    local status=0 wanted=$1 text=$2
    shift 2
    "$@" >"$work/refusal" 2>&1 || status=$?
    cat "$work/refusal"
    [ "$status" = "$wanted" ] && grep -q -- "$text" "$work/refusal"
}
nothing_installed() { ! find "$work/home" -type f 2>/dev/null | grep -q .; }
seconds() { local from=$EPOCHREALTIME; "$@"; awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f s\n", b - a }'; }

archive=$(basename "$work"/served/forebay-*.tar.gz)
mkdir "$work/home"

cp "$work/served/$archive" "$work/whole"
printf x | dd of="$work/served/$archive" bs=1 seek=1000 conv=notrunc status=none
check "a damaged archive is refused" refused 1 "is damaged" install
head -c 100000 "$work/whole" >"$work/served/$archive"
check "an archive that was cut is refused" refused 1 "is damaged" install
rm "$work/served/$archive"
check "a missing archive is refused" refused 1 "cannot be fetched" install
cp "$work/whole" "$work/served/$archive"
mv "$work/served/SHA256SUMS" "$work/sums"
check "missing checksums are refused" refused 1 "cannot be fetched" install
echo >"$work/served/SHA256SUMS"
check "checksums of other files are refused" refused 1 "does not name" install
cp "$work/sums" "$work/served/SHA256SUMS"
check "an unknown option is refused" refused 2 "does not exist" install --prefx /tmp
check "nothing was installed" nothing_installed
mkdir -p "$work/home/.local/bin"
echo mine >"$work/home/.local/bin/forebay"
check "a file of another program is left alone" refused 2 "did not install it" install
check "it is unchanged" grep -qx mine "$work/home/.local/bin/forebay"
rm "$work/home/.local/bin/forebay"

echo "        to install: $(seconds install | tail -n 1)"
check "it is installed" test -x "$work/home/.local/bin/forebay"
check "installing again replaces it" install
FROM=$files check "it installs from a folder, too" install --prefix "$work/other"
run() { env -i PATH=/usr/bin:/bin HOME="$work/home" "$work/home/.local/bin/forebay" "$@"; }
check "the program runs" run --version
check "it finds its demo model" run run --device cpu --prompt "Once upon a time" --max-tokens 20
echo "        to the first token of the demo: $(seconds run run --device cpu --prompt "Once upon a time" --max-tokens 1 2>/dev/null | tail -n 1)"
check "completions are there" test -s "$work/home/.local/share/bash-completion/completions/forebay"
check "a C program can use the library" cc -I "$work/home/.local/include" -x c - -o "$work/c" \
    -L "$work/home/.local/lib" -lforebay <<<'#include <forebay.h>
int main(void) { return 0; }'
touch "$work/home/.local/share/forebay/models/of-the-user.gguf"
check "it is removed" install --uninstall
check "a file of the user stays" test -e "$work/home/.local/share/forebay/models/of-the-user.gguf"
rm "$work/home/.local/share/forebay/models/of-the-user.gguf"
check "nothing else stays" nothing_installed

if package=$(ls "$files"/forebay_*.deb 2>/dev/null); then
    check "the Debian package is whole" dpkg-deb --extract "$package" "$work/debian"
    check "its program runs" "$work/debian/usr/bin/forebay" --version
    check "its program finds the demo model" env -i PATH=/usr/bin:/bin HOME="$work/home" \
        "$work/debian/usr/bin/forebay" run --device cpu --prompt x --max-tokens 2
fi
exit "$failed"
