#!/bin/sh
# Tensor parallel under Ray on one machine: Ray starts the workers, one a GPU. On a CPU it takes the plug-in of
# tests/vllm/ray_on_cpu on PYTHONPATH, and `ray start --head --num-gpus 3` beforehand, where a "GPU" is then a worker.
SPECULATIVE='{"method": "custom_class", "model": "paceline.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
PACELINE='{"paceline": {"method": "auto"}}'
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
exec vllm serve "$MODEL" --tensor-parallel-size "${GPUS:-3}" --distributed-executor-backend ray \
  --speculative-config "$SPECULATIVE" --additional-config "$PACELINE" "$@"
