#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under eight minutes: the tests that are skipped without one, T(k) of
# Llama-shaped models with random weights (1.1B, and 7B where two of them fit), and text from the default model with and
# without speculation. Numbers go to the folder given, as JSON; default gpu-results.
#   make dev && benchmarks/gpu.sh [--dry-run] [FOLDER]
# With --dry-run the commands are printed, and each program reads its options and stops: that needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
dry=
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi
out=${1:-gpu-results}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# run SECONDS STOP ARGUMENTS...: Python with these arguments, for so long at most. STOP is the option that makes the
# program stop when it has read the others.
run() {
  local seconds=$1 stop=$2
  shift 2
  if [ "$dry" ]; then
    printf '%q ' timeout "$seconds" "$python" "$@" && echo
    "$python" "$@" "$stop" > /dev/null
  else
    timeout "$seconds" "$python" "$@"
  fi
}

if [ ! "$dry" ]; then
  mkdir -p "$out"
  "$python" -c 'import torch; assert torch.cuda.is_available(), "torch finds no CUDA device"; print(torch.cuda.get_device_name())'
fi
run 120 --markers -m pytest -q -m gpu tests

pass=(benchmarks/target_pass.py --device cuda --dtype bfloat16 --tiers hf,torch --rounds 30 --seconds 40)
run 100 --check "${pass[@]}" --shape 1b --contexts 256,2048 --out "$out/target-pass-1b.json"
if [ "$dry" ] || "$python" -c 'import sys, torch; sys.exit(torch.cuda.mem_get_info()[0] < 36 << 30)'; then
  run 130 --check "${pass[@]}" --shape 7b --contexts 256 --out "$out/target-pass-7b.json"
else
  echo "less than 36 GB free: no 7B model"
fi

text=(-m paceline generate "Explain in a few sentences why the sky is blue." --device cuda --dtype float32)
text+=(--drafter prompt-lookup --max-new-tokens 128 --compare)
if [ "$dry" ]; then run 120 --help "${text[@]}"; else run 120 --help "${text[@]}" | tee "$out/text.txt"; fi
