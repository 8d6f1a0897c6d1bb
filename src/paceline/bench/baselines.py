"""transformers' own generation modes, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from paceline.api import LLM
from paceline.bench.latency import Arrivals, ArrivalStreamer
from paceline.bench.methods import Generated, Method
from paceline.errors import PacelineError, UnsupportedModel, first_line, require
from paceline.targets.loading import quiet
from paceline.targets.sources import load_model
from paceline.targets.tokenizers import require_tokenizer, same_tokenizer

if TYPE_CHECKING:
    from paceline.decoding.sampling import SamplingParams


class Generate(Method):
    """`model.generate` with its default cache: greedy or sampled, several prompts padded on the left."""

    def __init__(self, name: str, model: PreTrainedModel, llm: LLM) -> None:
        super().__init__(name)
        self.model: Any = model
        self.eos = list(llm.target.eos)

    def options(self) -> dict[str, Any]:
        """What this mode adds to `generate`."""
        return {}

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> Generated:
        """One call of `generate`.

        Raises:
            UnsupportedModel: when transformers refuses.
        """
        torch.manual_seed(seed)
        try:
            with quiet(), self._neutral(), self._counted() as passes:
                arrivals = Arrivals()
                ids, mask = self._padded(prompts)
                out = self.model.generate(
                    ids,
                    attention_mask=mask,
                    use_cache=True,
                    streamer=ArrivalStreamer(arrivals),
                    **self._sampling(params),
                    **self.options(),
                )
                outputs = [self._cut(row) for row in out[:, ids.shape[1] :].tolist()]
                seconds = arrivals.seconds
        except (PacelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModel(f"{self.name}: transformers' generate failed: {first_line(error)}") from error
        # Rows of a batch take part in passes until the longest ends; each pass gives a row at most one token here.
        return Generated(
            outputs,
            seconds,
            passes=passes[0] if len(prompts) == 1 else sum(map(len, outputs)),
            latencies=[arrivals.latency(0, len(output)) for output in outputs],
        )

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        return ids.to(self.model.device), mask.to(self.model.device)

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        own: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "eos_token_id": self.eos or None,
            "pad_token_id": self._pad,
            "do_sample": params.temperature > 0,
        }
        if params.temperature > 0:
            own |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
            own |= {"min_p": params.min_p or None}
        return own

    @property
    def _pad(self) -> int:
        return self.eos[0] if self.eos else 0

    def _cut(self, row: list[int]) -> list[int]:
        """Without the padding after the end-of-sequence token."""
        end = next((index for index, token in enumerate(row) if token in self.eos), len(row))
        return row[: end + 1]

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Without the model's generation defaults (a repetition penalty, say), which other methods do not apply."""
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            yield
        finally:
            self.model.generation_config = own

    @contextmanager
    def _counted(self) -> Iterator[list[int]]:
        """Counts the passes through all layers."""
        layers, passes = self.model.config.num_hidden_layers, [0]

        def count(*_: object) -> None:
            passes[0] += self.model.config.num_hidden_layers == layers

        hook = self.model.register_forward_pre_hook(count)
        try:
            yield passes
        finally:
            hook.remove()
            self.model.config.num_hidden_layers = layers  # early exit leaves it changed when it fails


class Lookup(Generate):
    """Prompt lookup decoding: `generate(prompt_lookup_num_tokens=tokens)`."""

    def __init__(self, name: str, model: PreTrainedModel, llm: LLM, *, tokens: int = 10) -> None:
        require(tokens >= 1, f"{name}: tokens must be at least 1, not {tokens}")
        super().__init__(name, model, llm)
        self.tokens = tokens

    def options(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.tokens}


class HFEarlyExit(Generate):
    """Self-speculation: the first `layers` layers and the model's head draft (`generate(assistant_early_exit=layers)`).

    It pays for models trained for it (LayerSkip), and works where the model's forward heeds
    `config.num_hidden_layers`.
    """

    def __init__(self, name: str, model: PreTrainedModel, llm: LLM, *, layers: int = 0) -> None:
        super().__init__(name, model, llm)
        depth = llm.target.num_layers
        require(
            1 <= layers < depth, f"{name}: say how many layers draft, as in hf-early-exit:layers=N, 1 <= N < {depth}"
        )
        self.layers = layers
        self._prove()

    def options(self) -> dict[str, Any]:
        return {"assistant_early_exit": self.layers}

    @torch.inference_mode()
    def _prove(self) -> None:
        """Raises UnsupportedModel where transformers would silently draft with the whole model."""
        ids = torch.tensor([[0, 1]], device=self.model.device)
        full = self.model(ids, use_cache=False).logits
        with self._counted():
            self.model.config.num_hidden_layers = self.layers
            exited = self.model(ids, use_cache=False).logits
        if torch.equal(full, exited):
            raise UnsupportedModel(f"{self.name}: {self.model.config.model_type} models always run all their layers")


class Assisted(Generate):
    """Assisted generation with a separate draft model, `generate(assistant_model=...)`; where its tokenizer is another,
    transformers' universal assisted generation.
    """

    def __init__(self, name: str, target: PreTrainedModel, llm: LLM, *, model: str = "") -> None:
        super().__init__(name, target, llm)
        require(bool(model), f"{name}: say which model drafts, as in hf-assisted:model=NAME")
        self.assistant, tokenizer = load_model(model, dtype=target.dtype, device=target.device)
        own = require_tokenizer(llm.target.tokenizer, name)
        same = same_tokenizer(own, tokenizer)
        self.tokenizers = {} if same else {"tokenizer": own, "assistant_tokenizer": tokenizer}

    def options(self) -> dict[str, Any]:
        return {"assistant_model": self.assistant, **self.tokenizers}
