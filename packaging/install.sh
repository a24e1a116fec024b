#!/bin/sh
# Installs forebay for one user, or with --prefix /usr/local for all.
#
#     sh install.sh [--from PLACE] [--prefix FOLDER] [--force]
#     sh install.sh --uninstall [--prefix FOLDER]
#
# PLACE is an address or a folder with SHA256SUMS and the archives of a release. The default is the release that this script
# came with. The archive is compared with its checksum before anything is unpacked, and the program is run once before anything
# is installed. A file that this script did not install is replaced only with --force.
set -eu

place='@PLACE@'
version='@VERSION@'
prefix=${HOME:-/usr/local}/.local
force=false
uninstall=false

fail() {
    echo "error: $1" >&2
    exit "${2:-1}"
}

while [ $# -gt 0 ]; do
    case $1 in
    --from) place=${2:?--from needs an address or a folder}; shift ;;
    --prefix) prefix=${2:?--prefix needs a folder}; shift ;;
    --force) force=true ;;
    --uninstall) uninstall=true ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
    *) fail "$1: this option does not exist; --help lists the options" 2 ;;
    esac
    shift
done
case $prefix in
/*) ;;
*) prefix=$PWD/$prefix ;;
esac
# One installed file on each line, relative to the prefix.
list=share/forebay/installed-files

# Removes what an earlier run of this script has installed, except the files named in the file $1.
remove_old() {
    while IFS= read -r file; do
        grep -qxF -- "$file" "$1" || rm -f -- "$prefix/$file"
    done <"$prefix/$list"
}

if $uninstall; then
    [ -f "$prefix/$list" ] || fail "$prefix/$list does not exist: this script has installed nothing there"
    remove_old /dev/null
    rm -f -- "$prefix/$list"
    # Folders stay if they hold something else.
    rmdir -- "$prefix/share/forebay/models" "$prefix/share/forebay" 2>/dev/null || true
    echo "forebay is removed from $prefix. Downloaded models stay where they are."
    exit 0
fi

case $(uname -s) in
Linux) ;;
*) fail "there are archives for Linux only, and this is $(uname -s)" ;;
esac
case $(uname -m) in
x86_64 | amd64) machine=x86_64 ;;
aarch64 | arm64) machine=aarch64 ;;
*) fail "there are archives for x86_64 and aarch64, and this is $(uname -m): build from source" ;;
esac
case $place in
@*) fail "this copy of the script belongs to no release: name the place of the archives with --from" 2 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Brings the file $1 of the release to $2.
bring() {
    case $place in
    http://* | https://*)
        if command -v curl >/dev/null; then
            curl --fail --silent --show-error --location --connect-timeout 20 --retry 3 --output "$2" "$place/$1"
        elif command -v wget >/dev/null; then
            wget --quiet --timeout=20 --tries=3 --output-document="$2" "$place/$1"
        else
            fail "neither curl nor wget is installed: install one of them"
        fi
        ;;
    *) cp -- "$place/$1" "$2" ;;
    esac || fail "$place/$1 cannot be fetched"
}

sum_of() {
    if command -v sha256sum >/dev/null; then
        sha256sum "$1"
    elif command -v shasum >/dev/null; then
        shasum -a 256 "$1"
    else
        fail "neither sha256sum nor shasum is installed: install one of them"
    fi | cut -d ' ' -f 1
}

archive=forebay-$version-linux-$machine.tar.gz
bring SHA256SUMS "$work/SHA256SUMS"
expected=$(sed -n "s/^\([0-9a-f]\{64\}\) [ *]$archive\$/\1/p" "$work/SHA256SUMS")
[ -n "$expected" ] || fail "$place/SHA256SUMS does not name $archive"
bring "$archive" "$work/$archive"
found=$(sum_of "$work/$archive")
[ "$found" = "$expected" ] || fail "$archive is damaged: its SHA-256 is $found, not $expected. Nothing was installed"

mkdir "$work/unpacked"
tar -xzf "$work/$archive" -C "$work/unpacked" --strip-components=1
said=$("$work/unpacked/bin/forebay" --version 2>&1) ||
    fail "the program does not run on this machine: $said. Build from source, or use a newer system"

(cd "$work/unpacked" && find . -type f | sed 's|^\./||' | sort) >"$work/files"
if [ -f "$prefix/$list" ]; then
    remove_old "$work/files"
elif ! $force; then
    while IFS= read -r file; do
        [ ! -e "$prefix/$file" ] ||
            fail "$prefix/$file exists, and this script did not install it: remove it, or give --force" 2
    done <"$work/files"
fi
mkdir -p "$prefix/share/forebay"
# The list is installed first, so that a run that is interrupted can be removed, or repeated.
cp "$work/files" "$prefix/$list.new"
mv -f "$prefix/$list.new" "$prefix/$list"
while IFS= read -r file; do
    mkdir -p "$prefix/$(dirname "$file")"
    # A program that runs keeps its old file.
    cp -p "$work/unpacked/$file" "$prefix/$file.new"
    mv -f "$prefix/$file.new" "$prefix/$file"
done <"$work/files"

echo "$said is installed in $prefix"
case :${PATH:-}: in
*:"$prefix/bin":*) ;;
*) echo "add its folder to your PATH:  export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
echo "next:  forebay run        a short story by the demo model"
