#!/bin/sh
# Tensor parallel in processes of one machine. PROCESSES must divide the model's attention heads: 3, not 2, for the model
# named here.
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "auto"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
exec vllm serve "$MODEL" --tensor-parallel-size "${PROCESSES:-3}" --distributed-executor-backend mp \
  --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@"
