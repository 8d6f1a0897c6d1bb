#!/usr/bin/env bash
# Makes the heads that are shipped for the default model: data, then heads, one after the other. Give it again after a
# stop, and it goes on. Hours on two cores.
#
#     benchmarks/shipped_heads.sh PROMPTS OUT [HEAD …]
#
# PROMPTS: folder with the files named below (see PROVENANCE.md for sources and licences). OUT: folder of data and heads.
# HEAD: eagle3, eagle-k1, eagle-k2, medusa-k1, early-exit; default: all, in this order. ANSWERS: how many tokens the
# model writes (default 700000); TEXT: of how many tokens of given answers it is asked what it would have said, per
# token written; DTYPE: in which arithmetic it writes (default bfloat16, which is half again as fast where the CPU
# has such products).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
    echo "usage: benchmarks/shipped_heads.sh PROMPTS OUT [HEAD …], where PROMPTS is a folder" >&2
    exit 2
fi
prompts=$(realpath "$1") out=$2
shift 2
heads=("$@")
[ ${#heads[@]} -gt 0 ] || heads=(eagle3 eagle-k1 eagle-k2 medusa-k1 early-exit)
here=$(cd "$(dirname "$0")" && pwd)
export PATH="$here/../.venv/bin:$PATH"
mkdir -p "$out" && cd "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two processes of one thread write more than one of two

[ -f made_up_prompts.jsonl ] || python "$here/made_up_prompts.py" "$prompts/corpus_text_books.jsonl" --out made_up_prompts.jsonl
[ -f own_prompts.jsonl ] || paceline train prompts --count 1200 -n 160 --batch 64 --seed 5 --out own_prompts.jsonl

asked=() given=()
for name in gsm8k_2k code_gpteacher_codegen chat_gpteacher_roleplay chat_oasst_en100 xsum_t0_200 cnndm_t0_195 dolly_other; do
    asked+=(--prompts "$prompts/train_$name.jsonl")
done
for name in gsm8k_2k code_gpteacher_codegen chat_gpteacher_roleplay chat_oasst_en100; do
    given+=(--text "$prompts/train_$name.jsonl")
done
write() { # SHARE: half of the shards
    paceline train data --tier native --prompts made_up_prompts.jsonl --prompts own_prompts.jsonl "${asked[@]}" "${given[@]}" \
        --text-share "${TEXT:-0.4}" --max-tokens "${ANSWERS:-700000}" --dtype "${DTYPE:-bfloat16}" -n 192 --batch 64 --group 128 --seed 21 --shard "$1" --out data
}
write 0/2 &
first=$!
write 1/2
wait $first

export OMP_NUM_THREADS=$(nproc)
common=(--data data --vocab 7168 --weight-decay 0.05 --held-back 192 --report 600)
for head in "${heads[@]}"; do
    resume=()
    [ ! -d "$head" ] || resume=(--resume)
    case $head in
        eagle3) paceline train eagle3 "${common[@]}" --token added --objective whole --epochs 6 --steps 3600 --out "$head" "${resume[@]}" ;;
        eagle-k1) paceline train eagle "${common[@]}" --objective whole --epochs 6 --steps 3600 --out "$head" "${resume[@]}" ;;
        eagle-k2) paceline train eagle -K 2 "${common[@]}" --objective whole --epochs 6 --steps 3600 --out "$head" "${resume[@]}" ;;
        medusa-k1) paceline train medusa --heads 3 "${common[@]}" --objective whole --epochs 6 --steps 1800 --out "$head" "${resume[@]}" ;;
        early-exit) paceline train early-exit -N 4 "${common[@]}" --epochs 6 --steps 3600 --out "$head" "${resume[@]}" ;;
        *) echo "there is no head $head: eagle3, eagle-k1, eagle-k2, medusa-k1 or early-exit" >&2; exit 2 ;;
    esac
done
