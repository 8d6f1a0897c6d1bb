#!/bin/sh
# Not run yet: a cluster of GPU machines under Ray. Before: `ray start --head` on one, `ray start --address HEAD:6379` on
# the others, and paceline installed on all. CUDA graphs want steps of one shape, hence the mode.
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "auto", "mode": "pad"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
exec vllm serve "$MODEL" --tensor-parallel-size "${GPUS:-8}" --pipeline-parallel-size "${MACHINES:-2}" \
  --distributed-executor-backend ray --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@"
