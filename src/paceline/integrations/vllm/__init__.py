"""paceline's model-free drafters and draft lengths inside vLLM, as its `custom_class` (docs/vllm-drafters.md)."""

from __future__ import annotations

from paceline.integrations.vllm.proposer import Proposer, WorkerExtension

__all__ = ["Proposer", "WorkerExtension"]
