#!/usr/bin/env bash
# README's way, walked as a newcomer does: a fresh clone, environment and cache; each step's seconds.
#
#     benchmarks/newcomer.sh [REPOSITORY]        # default: this one, as it is committed
#
# TORCH names a torch to install first, as README advises where the CPU is enough, with pip's options if need be:
# TORCH='torch==2.13.0'. Without it pip chooses, a few GB on Linux. PYTHON: the interpreter to begin with.
set -euo pipefail
from=${1:-$(cd "$(dirname "$0")/.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PACELINE_CACHE=$work/cache
unset PYTHONPATH

step() {  # TITLE COMMAND…
    local title=$1 began=$SECONDS
    shift
    "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
    printf '%5d s  %s\n' $((SECONDS - began)) "$title"
}

step "git clone" git clone --quiet "$from" "$work/paceline"
cd "$work/paceline"
if [ -n "${TORCH:-}" ]; then
    step "an environment" "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC2086
    step "$TORCH" .venv/bin/pip install $TORCH
fi
step "make demo: the first answer" make demo
echo "$(printf '%5d s' $SECONDS)  to the first answer"
step "examples/train_a_head.py" .venv/bin/python examples/train_a_head.py
echo "$(printf '%5d s' $SECONDS)  to a trained head"
