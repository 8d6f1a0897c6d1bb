#!/bin/sh
# One process. See docs/vllm-drafters.md for what to install.
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "auto"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
exec vllm serve "$MODEL" --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@"
