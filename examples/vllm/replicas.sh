#!/bin/sh
# Two replicas on ports 8001 and 8002, each with a proposer of its own, and a reverse proxy before them on port 8000.
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "auto"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
trap 'kill $RUNNING' EXIT
for PORT in 8001 8002; do
  vllm serve "$MODEL" --port $PORT --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@" &
  RUNNING="$RUNNING $!"
done
python "$(dirname "$0")/proxy.py" 8000 http://127.0.0.1:8001 http://127.0.0.1:8002
