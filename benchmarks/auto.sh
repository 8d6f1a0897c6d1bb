#!/usr/bin/env bash
# Whether `auto` is the best row of every table, and never loses to plain decoding; and `pace` among the policies.
#
#     benchmarks/auto.sh [OUT] [PART...]      # default: benchmarks/results/auto, all parts
#
# table     every drafter that the default model has, under its default policy and under fixed:k=2, transformers' own
#           generate and prompt lookup, and auto: greedy and at temperature 0.7.
# fallback  where drafting cannot pay: text that nobody can guess (temperature 5 draws all but random words), and eight
#           prompts at a time.
# pace      each drafter that pays for its tokens, under every policy.
#
# Methods take turns on every prompt of a run. A run that was stopped goes on; the machine should be idle: on two cores
# the whole takes hours. For a quick look: TOKENS=32 LIMIT=1 (first prompts of each task) TIERS=native.
# SUITE names other prompts than those that come along, PYTHON the interpreter that has paceline.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/auto}
shift || true
parts=("${@:-table fallback pace}")
python=${PYTHON:-.venv/bin/python}
suite=${SUITE:-benchmarks/prompts/tuning.jsonl}

# one_task: the suite with all prompts in one task, since a batch is of one.
one_task() {
    "$python" -c 'import json, sys
for line in sys.stdin:
    print(json.dumps(json.loads(line) | {"group": "all"}))' < "$suite" > "$out/one-task.jsonl"
    echo "$out/one-task.jsonl"
}

# bench NAME METHODS OPTIONS...: one run on each tier, and its tables.
bench() {
    local name=$1 methods=$2
    shift 2
    for tier in ${TIERS:-torch native}; do
        "$python" -m paceline bench --suite "$suite" --methods "$methods" --tier "$tier" \
            --max-new-tokens "${TOKENS:-128}" ${LIMIT:+--limit "$LIMIT"} --out "$out/$name/$tier" "$@" >&2
        "$python" benchmarks/table.py "$out/$name/$tier" --tasks-of speedup_ar
        echo
    done
}

# with POLICIES DRAFTERS: each drafter with each policy, where "-" is its default one.
with() {
    local policy drafter
    for drafter in $2; do
        for policy in $1; do
            if [ "$policy" = - ]; then printf ',%s' "$drafter"; else printf ',%s+%s' "$drafter" "$policy"; fi
        done
    done
}

free="prompt-lookup suffix recycling lookahead trigram"
paying="early-exit layer-skip medusa eagle"
for part in ${parts[*]}; do
    case $part in
        table)
            bench table "ar,hf,hf-lookup,auto$(with "- fixed:k=2" "${DRAFTERS:-$free $paying}")" --temperature 0,0.7
            ;;
        fallback)
            bench random-words ar,trigram,auto --temperature 5
            mkdir -p "$out"
            suite=$(one_task) LIMIT=${LIMIT:+$((8 * LIMIT))} bench batch-8 ar,trigram,auto --temperature 0,0.7 --batch 8
            ;;
        pace)
            lengths="fixed:k=1 fixed:k=2 fixed:k=3 fixed:k=4 schedule"
            rules="pace max-confidence adaedl beta-ts:cost=auto cali-ts:cost=auto"
            bench pace "ar$(with "$rules $lengths" "${DRAFTERS:-$paying}")"
            ;;
        *)
            echo "auto.sh: no part '$part'; there are table, fallback and pace" >&2
            exit 2
            ;;
    esac
done
