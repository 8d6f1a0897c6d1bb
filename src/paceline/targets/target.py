"""The model being accelerated, seen as blocks: `embed -> layers[i:j] -> head`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.errors import ContextOverflow, require
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.context import ENDLESS, context_of
from paceline.targets.layered import LayeredCache, Layout
from paceline.targets.logits import argmax
from paceline.targets.placing import device_of
from paceline.targets.span import Span
from paceline.targets.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Part = slice | tuple[int, slice]  # of the tensors of a pass

FEATURES = -1  # the tap of what left the final norm, of a target that has no blocks: others compute it (`features`)
PREFILL_CHUNK = 512  # bounds the attention mask and the activations of a long prompt


class PassOutput:
    """What came of a pass.

    Args:
        logits: `[batch, width, vocab]`; or what computes them when they are asked for.
        taps: tap i is the hidden states that enter layer i; `FEATURES` what left the final norm.
        likeliest: the first of the largest logits, where the pass tells.
        firsts: where each row's nodes begin, of a pass that left the padding out: all tensors then have the dimension
            `tokens` in place of `batch` and `width`.
    """

    def __init__(
        self,
        logits: Tensor | Callable[[], Tensor],
        taps: Mapping[int, Float[Tensor, "batch width hidden"]],
        likeliest: Int[Tensor, "batch width"] | None = None,
        firsts: Sequence[int] | None = None,
    ) -> None:
        self._logits, self.taps, self.likeliest, self._firsts = logits, taps, likeliest, firsts

    @property
    def logits(self) -> Float[Tensor, "batch width vocab"]:
        if not isinstance(self._logits, Tensor):
            self._logits = self._logits()
        return self._logits

    def row(self, row: int, width: int) -> PassOutput:
        """One row's part without its padding (views)."""
        part = self._part(row, width)
        return PassOutput(lambda: self.logits[part], TapsOfRow(self.taps, part))

    def choices(self) -> list[list[int]]:
        """By row: the likeliest token of each node."""
        found: list[Any] = argmax(self.logits) if self.likeliest is None else self.likeliest.tolist()
        return found if self._firsts is None else [found[first:last] for first, last in pairwise([*self._firsts, None])]

    def _part(self, row: int, width: int) -> Part:
        if self._firsts is None:
            return row, slice(width)
        return slice(self._firsts[row], self._firsts[row] + width)

    def at(self, nodes: list[int]) -> PassOutput:
        """Of one row's part, that of some of its nodes."""
        return PassOutput(lambda: self.logits[nodes], {tap: hidden[nodes] for tap, hidden in self.taps.items()})


class TapsOfRow(Mapping[int, Tensor]):
    """One row's part of what was tapped: views that are made when they are asked for, since most never are."""

    def __init__(self, taps: Mapping[int, Tensor], part: Part) -> None:
        self._taps, self._part = taps, part

    def __getitem__(self, tap: int) -> Float[Tensor, "width hidden"]:
        return self._taps[tap][self._part]

    def __iter__(self) -> Iterator[int]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)


class Target(ABC):
    """A causal LM behind one interface, whatever runs it.

    `has_blocks` says whether its parts (`embed` to `head`) work one by one; without them only `forward` does.
    `exact` promises that a token's result has the same bits whatever the width of the pass, so that greedy output is
    plain decoding's bit for bit; `exactness` says in a few words why it does, or does not.
    `chains_only` says that it cannot verify a tree with branches.
    `foreign` says that another engine runs it: its weights and states are given to drafters later, if at all.
    `takes_back` says that tokens leave the cache when its lengths are set back, not by `commit` alone.
    `packs` says that it leaves out the padding of a batch, which then takes no time.
    `ends_early` says that a prompt's pass takes less where nobody wants the last hidden states.
    `border` is the length of a text that drafts had better not go beyond, since a pass over both sides is dear; after
    it they are free.
    `layout` says what each layer keeps, where layers differ; it is empty where one tensor holds all keys and values.
    `weight_count` is the number of weights that every pass multiplies by, `weight_bytes` what a pass over
    a few tokens reads of them.
    Hidden states and the cache are of `dtype`; matrix products have the precision of `compute_dtype`.
    Layers are numbered as in the model; "tap i" is the hidden state entering layer i, so tap `num_layers` is the
    input of the final norm.
    Passes of several threads take turns: `turns`.
    """

    has_blocks = True
    tier = "reference"
    exact = False
    chains_only = False
    foreign = False
    takes_back = True
    packs = False
    ends_early = False
    border = ENDLESS
    exactness = "the order in which torch's operations sum depends on the width of the pass"
    layout: Layout = {}  # noqa: RUF012

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        config = model.config.get_text_config()
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.turns = Turns()
        self.dtype, self.device = model.dtype, device_of(model)
        self.compute_dtype = self.dtype
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.context = context_of(config)
        matrices = _matrices(model)
        self.weight_count = sum(weight.numel() for weight in matrices)
        self.weight_bytes = sum(weight.nbytes for weight in matrices)

    @property
    def model_dtype(self) -> torch.dtype:
        """Of a transformers model that computes the same as nearly as one can."""
        return self.compute_dtype if self.compute_dtype.is_floating_point else torch.float32

    @property
    def greedy_weight_count(self) -> int:
        """Of `weight_count` those that `forward_greedy` multiplies by in full."""
        return self.weight_count

    @property
    def greedy_weight_bytes(self) -> int:
        """`weight_bytes` of a `forward_greedy`."""
        return self.weight_bytes

    @property
    def eos(self) -> tuple[int, ...]:
        """End-of-sequence ids, as the model's generation config (or else its config) names them."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = getattr(self.config, "eos_token_id", None) if ids is None else ids
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def name(self) -> str:
        outer = self.model.config  # of a model that sees as well, only this one tells
        return outer.name_or_path or self.config.name_or_path or self.config.model_type

    @property
    def windows(self) -> list[int]:
        """By layer: how many tokens a token sees, itself included; 0: all before it. Empty where `layout` tells."""
        return []

    # -- the block view --------------------------------------------------------------------------------------------
    @abstractmethod
    def embed(self, span: Span) -> Float[Tensor, "batch width hidden"]: ...

    @abstractmethod
    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
        beside: Tensor | None = None,
    ) -> Float[Tensor, "batch width hidden"]:
        """Run layers `start .. stop-1`, writing their keys and values at the span's slots.

        Args:
            skip: sublayers to leave out, as `(layer, "attention" | "mlp")` (Draft & Verify's layer skipping).
            beside: `[batch, width, hidden]`, which the attention of layer `start` reads side by side with its normed
                input. For layers made so (EAGLE-3's first), whose query, key and value matrices have twice the inputs.
        """

    @abstractmethod
    def features(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """The final norm: what the output matrix reads, and draft heads (Medusa, EAGLE) learn from."""

    @abstractmethod
    def logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """The output matrix."""

    def head(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Final norm and output matrix."""
        return self.logits(self.features(hidden))

    def judge(self, logits: Float[Tensor, " tokens"]) -> tuple[int, float, float] | None:
        """The likeliest token, its probability, and the entropy in nats, where the tier has a call for that."""
        return None

    #: The token at a quantile of softmax(scores / temperature), where the tier has a call for that, as for
    #: `decoding.verify.at_quantile`.
    draw: Callable[[Tensor, float, float], int] | None = None

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Float[Tensor, "batch width hidden"] | None = None,
    ) -> PassOutput:
        """One pass over the span: logits of every node, and the hidden states asked for.

        Args:
            start: the layer to begin with, where those below have run over the whole span already.
            hidden: what enters that layer; needed where `start` is above 0. No tap may lie below.
        """
        hidden, tapped = self._through(span, cache, taps, start, hidden)
        return PassOutput(self.head(hidden), tapped)

    def forward_greedy(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Float[Tensor, "batch width hidden"] | None = None,
    ) -> PassOutput:
        """As `forward`, where hardly more than the likeliest token of each node will be looked at: a tier that finds
        these without all logits computes logits when they are asked for.
        """
        return self.forward(span, cache, taps, start, hidden)

    def _through(
        self, span: Span, cache: KVCache, taps: Collection[int], start: int = 0, hidden: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        check_taps(taps, start)
        return self._layers_tapped(self.embed(span) if hidden is None else hidden, span, cache, start, taps)

    def _layers_tapped(
        self, hidden: Tensor, span: Span, cache: KVCache, start: int, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Layers from `start` on, and what enters those of `taps`."""
        at, tapped = start, {}
        for tap in sorted({*taps, self.num_layers}):
            if tap > at:
                hidden = self.layers(hidden, span, cache, at, tap)
            at, tapped[tap] = tap, hidden
        return hidden, {tap: tapped[tap] for tap in taps}

    # -- what drafters and the engine build on ---------------------------------------------------------------------
    @abstractmethod
    def cache_shape(self) -> CacheShape: ...

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        if self.layout:
            return LayeredCache.of(self.layout, batch, capacity, self.dtype, self.device)
        return KVCache.allocate(self.cache_shape(), batch, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(
        self, ids: list[int], cache: KVCache, taps: Collection[int] = (), chunk: int = PREFILL_CHUNK
    ) -> dict[int, Float[Tensor, "tokens hidden"]]:
        """Append `ids` to a one-row cache; returns the tapped hidden states. No logits are computed."""
        pieces: dict[int, list[Tensor]] = {tap: [] for tap in taps}
        for at in range(0, len(ids), chunk):
            piece = torch.tensor([ids[at : at + chunk]], device=self.device)
            tapped = self._prefill_pass(Span(piece, cache.lengths.copy(), final=True), cache, taps)
            cache.lengths[0] += piece.shape[1]
            for tap in taps:
                pieces[tap].append(tapped[tap][0])
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return {tap: joined(parts or [nothing]) for tap, parts in pieces.items()}

    def _prefill_pass(self, span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
        return self._through(span, cache, taps)[1]

    def check_fits(self, prompt: int, new: int) -> None:
        """Raises ContextOverflow when `prompt + new` tokens do not fit the model's context."""
        if prompt + new > self.context:
            raise ContextOverflow(
                f"prompt of {prompt} tokens + {new} new tokens exceed the model's context of {self.context} tokens"
            )

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises OptionError where the model has no row for a token: a tokenizer may have more tokens."""
        bad = [token for token in ids if not 0 <= token < self.vocab_size]
        require(not bad, f"token id {bad[:1]} is outside the vocabulary of {self.vocab_size}")


def joined(parts: Sequence[Float[Tensor, "_ hidden"]]) -> Float[Tensor, "tokens hidden"]:
    """One below the other; nothing is copied where there is only one."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def check_taps(taps: Collection[int], start: int) -> None:
    """Raises ValueError for those that a pass from layer `start` on does not come by."""
    if any(tap < start for tap in taps):
        raise ValueError(f"a pass from layer {start} on cannot tap what entered a layer below")


def _matrices(model: PreTrainedModel) -> list[Tensor]:
    """The weights a pass reads in full: not the tables it looks rows up in, nor vectors, which weigh nothing."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} - {id(output)}
    return [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables]
