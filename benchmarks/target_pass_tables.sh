#!/usr/bin/env bash
# All figures of docs/target-pass.md: what a pass costs by width, context and batch, peak memory, and llama.cpp. Numbers
# go to benchmarks/results/target-pass as JSON, tables of them into the document. Some 15 minutes on two idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
out=benchmarks/results/target-pass

pass="benchmarks/target_pass.py --rounds ${ROUNDS:-15} --seconds 120"
"$python" $pass --tiers hf,reference,torch,native-fp32,native --out $out/widths.json
"$python" $pass --tiers hf,torch,torch-inexact,native-fp32,native --widths 1,8 --contexts 256,1024,2048,4096,8184 \
  --out $out/contexts.json
"$python" $pass --tiers hf,torch,native-fp32,native --widths 1,8 --batches 1,2,4,8 --out $out/batches.json
"$python" benchmarks/memory.py --out $out/memory.json
"$python" benchmarks/llama_cpp.py --out $out/llama-cpp.json
"$python" benchmarks/target_pass_doc.py $out docs/target-pass.md
