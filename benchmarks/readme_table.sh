#!/usr/bin/env bash
# The table of README's "What it brings": one run of a few methods on each fast tier, and both as one Markdown table.
#
#     benchmarks/readme_table.sh [OUT]        # default: benchmarks/results/readme
#
# The prompts come along, so this runs as it stands, some minutes on two cores; the machine should be idle. Methods take
# turns on every prompt of a tier; the tiers follow each other. A run that was stopped goes on. For a quick look:
# TOKENS=48 LIMIT=2 (first prompts of each task) METHODS=ar,hf,trigram.
# PYTHON names the interpreter that has paceline (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/readme}
python=${PYTHON:-.venv/bin/python}
methods=${METHODS:-ar,hf,hf-lookup,prompt-lookup,trigram,auto,eagle,early-exit,medusa}
for tier in torch native; do
    "$python" -m paceline bench --suite benchmarks/prompts/tuning.jsonl --methods "$methods" \
        --max-new-tokens "${TOKENS:-128}" ${LIMIT:+--limit "$LIMIT"} --tier "$tier" --out "$out/$tier" > "/dev/stderr"
done
"$python" benchmarks/table.py "$out/torch" "$out/native"
