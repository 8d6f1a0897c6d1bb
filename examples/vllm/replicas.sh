#!/bin/sh
# Not run yet: two replicas on ports 8001 and 8002, each with a proposer of its own. Put a reverse proxy before them, for
# example nginx: upstream vllm { least_conn; server 127.0.0.1:8001; server 127.0.0.1:8002; }
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "merge:drafters=suffix|trigram"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
trap 'kill $FIRST' EXIT
vllm serve "$MODEL" --port 8001 --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@" &
FIRST=$!
vllm serve "$MODEL" --port 8002 --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@"
