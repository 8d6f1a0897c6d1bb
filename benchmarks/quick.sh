#!/usr/bin/env bash
# Is the working tree slower than the last release? Both decode the same prompts by turns, some three minutes on two
# idle cores; fails when something is slower by more than the noise, or when token ids differ.
#
#     benchmarks/quick.sh [COMMIT]        # default: the last tag v*, or where there is none what last set the version
#
# It prints what it found as rows in the form of benchmarks/history (see releases.py), a tier each; ROWS=FILE appends them.
# PYTHON names the interpreter that has what paceline needs (default: .venv/bin/python). OPTIONS are for against.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [ $# -gt 0 ]; then
    base=$1
elif ! base=$(git describe --tags --abbrev=0 --match 'v*' 2> /dev/null); then
    base=$(git log -1 --format=%h -- src/paceline/version.py 2> /dev/null || true)
    if [ -z "$base" ]; then
        echo "error: no release leads here: name a commit, as in make bench-quick BASE=COMMIT" >&2
        exit 2
    fi
fi
if ! git cat-file -e "$base^{commit}" 2> /dev/null; then
    echo "error: there is no commit $base" >&2
    exit 2
fi
other=$(mktemp -d)
trap 'rm -rf "$other"' EXIT
git archive "$base" src | tar -x -C "$other"
echo "the working tree against $base" >&2
rows=$other/rows.jsonl
compare() {
    "$python" benchmarks/against.py "$other/src" --judge --names "$(git describe --always --dirty)" "$base" --rows "$rows" "$@"
}
status=0
# shellcheck disable=SC2086 # OPTIONS are words
{
    compare --tiers native --methods none,auto,trigram,eagle ${OPTIONS:-} || status=1
    compare --tiers torch --methods none,trigram --limit 3 --tokens 32 ${OPTIONS:-} || status=1
}
if [ -f "$rows" ]; then
    tee ${ROWS:+-a "$ROWS"} < "$rows"
fi
exit $status
