#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under eight minutes: the tests that are skipped without one, T(k) of
# Llama-shaped models with random weights (1.1B, and 7B where two of them fit), and text from the default model with and
# without speculation. Numbers go to the folder given, as JSON; default gpu-results.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$python" -c 'import torch; assert torch.cuda.is_available(), "torch finds no CUDA device"; print(torch.cuda.get_device_name())'
timeout 120 "$python" -m pytest -q -m gpu tests

pass="benchmarks/target_pass.py --device cuda --dtype bfloat16 --tiers hf,torch --rounds 30 --seconds 40"
timeout 100 "$python" $pass --shape 1b --contexts 256,2048 --out "$out/target-pass-1b.json"
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.mem_get_info()[0] < 36 << 30)'; then
  timeout 130 "$python" $pass --shape 7b --contexts 256 --out "$out/target-pass-7b.json"
else
  echo "less than 36 GB free: no 7B model"
fi

timeout 120 "$python" -m paceline generate "Explain in a few sentences why the sky is blue." \
  --device cuda --dtype float32 --drafter prompt-lookup --max-new-tokens 128 --compare | tee "$out/text.txt"
