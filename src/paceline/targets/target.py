"""The model being accelerated, seen as blocks: `embed -> layers[i:j] -> head`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.errors import ContextOverflow, UnsupportedModel
from paceline.targets.cache import CacheShape, CacheWindow, KVCache
from paceline.targets.families import FAMILIES, run_sublayers
from paceline.targets.span import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFILL_CHUNK = 512  # bounds the attention mask and the activations of a long prompt


class PassOutput(NamedTuple):
    logits: Float[Tensor, "batch width vocab"]
    taps: dict[int, Float[Tensor, "batch width hidden"]]  # tap i: the hidden states that enter layer i

    def row(self, row: int, width: int) -> PassOutput:
        """One row's part without its padding (views)."""
        return PassOutput(self.logits[row, :width], {tap: hidden[row, :width] for tap, hidden in self.taps.items()})


class Target(ABC):
    """A causal LM behind one interface, whatever runs it.

    `has_blocks` says whether its parts (`embed` to `head`) work one by one; without them only `forward` does.
    `exact` promises that a token's result has the same bits whatever the width of the pass, so that greedy output is
    plain decoding's bit for bit; `exactness` says in a few words why it does, or does not.
    `weight_count` is the number of weights that every pass multiplies by, `weight_bytes` what they take as stored.
    Hidden states and the cache are of `dtype`; matrix products have the precision of `compute_dtype`.
    Layers are numbered as in the model; "tap i" is the hidden state entering layer i, so tap `num_layers` is the
    input of the final norm.
    """

    has_blocks = True
    tier = "reference"
    exact = False
    exactness = "the order in which torch's operations sum depends on the width of the pass"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        config = model.config.get_text_config()
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.dtype, self.device = model.dtype, model.device
        self.compute_dtype = self.dtype
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or 2**31
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # a pass beyond this length turns all its positions another way
            self.context = min(self.context, rope["original_max_position_embeddings"])
        matrices = _matrices(model)
        self.weight_count = sum(weight.numel() for weight in matrices)
        self.weight_bytes = sum(weight.nbytes for weight in matrices)

    @property
    def eos(self) -> tuple[int, ...]:
        """End-of-sequence ids, as the model's generation config (or else its config) names them."""
        ids = self.model.generation_config.eos_token_id
        ids = self.config.eos_token_id if ids is None else ids
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def name(self) -> str:
        return self.config.name_or_path or self.config.model_type

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
    ) -> Float[Tensor, "batch width hidden"]:
        """Run layers `start .. stop-1`, writing their keys and values at the span's slots.

        Args:
            skip: sublayers to leave out, as `(layer, "attention" | "mlp")` (Draft & Verify's layer skipping).
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

    def _through(
        self, span: Span, cache: KVCache, taps: Collection[int], start: int = 0, hidden: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if any(tap < start for tap in taps):
            raise ValueError(f"a pass from layer {start} on cannot tap what entered a layer below")
        if hidden is None:
            hidden = self.embed(span)
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
        return KVCache.allocate(self.cache_shape(), batch, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(
        self, ids: list[int], cache: KVCache, taps: Collection[int] = (), chunk: int = PREFILL_CHUNK
    ) -> dict[int, Float[Tensor, "tokens hidden"]]:
        """Append `ids` to a one-row cache; returns the tapped hidden states. No logits are computed."""
        pieces: dict[int, list[Tensor]] = {tap: [] for tap in taps}
        for at in range(0, len(ids), chunk):
            piece = torch.tensor([ids[at : at + chunk]], device=self.device)
            tapped = self._prefill_pass(Span(piece, cache.lengths.copy()), cache, taps)
            cache.lengths[0] += piece.shape[1]
            for tap in taps:
                pieces[tap].append(tapped[tap][0])
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return {tap: torch.cat(parts or [nothing]) for tap, parts in pieces.items()}

    def _prefill_pass(self, span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
        return self._through(span, cache, taps)[1]

    def check_fits(self, prompt: int, new: int) -> None:
        """Raises ContextOverflow when `prompt + new` tokens do not fit the model's context."""
        if prompt + new > self.context:
            raise ContextOverflow(
                f"prompt of {prompt} tokens + {new} new tokens exceed the model's context of {self.context} tokens"
            )


class BlockTarget(Target):
    """The reference tier: Hugging Face's own modules, layer by layer, with our cache, mask and positions."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self.family = FAMILIES[self.config.model_type]
        self.decoder = getattr(model, self.family.decoder)
        self.output = model.get_output_embeddings()  # by any name: transformers has changed some
        self.eager = model.config._attn_implementation == "eager"  # which knows no causal default

    def cache_shape(self) -> CacheShape:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return CacheShape(self.num_layers, kv_heads, head_dim)

    def embed(self, span: Span) -> Tensor:
        embedded: Tensor = getattr(self.decoder, self.family.embed)(span.ids)
        scale = self.family.number(self.config, self.family.embedding_scale)
        return embedded if scale == 1.0 else embedded * scale

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
    ) -> Tensor:
        positions = span.positions.clamp(max=self.context - 1)  # padding nodes may lie behind the context's end
        arguments = {
            "attention_mask": span.mask(hidden.dtype, explicit=self.eager),
            "position_ids": positions,
            "position_embeddings": self.decoder.rotary_emb(hidden, positions),
            "use_cache": True,
            self.family.cache_argument: CacheWindow(cache, span),
        }
        for index in range(start, stop):
            layer = self.decoder.layers[index]
            attention, mlp = (index, "attention") not in skip, (index, "mlp") not in skip
            if attention and mlp:
                hidden = layer(hidden, **arguments)
            else:
                hidden = run_sublayers(self.family, layer, hidden, attention, mlp, **arguments)
        return hidden

    def features(self, hidden: Tensor) -> Tensor:
        features: Tensor = getattr(self.decoder, self.family.norm)(hidden)
        return features

    def logits(self, features: Tensor) -> Tensor:
        return self.family.adjusted(self.config, self.output(features))


class WholeTarget(Target):
    """Any other causal LM, through its whole forward. Construction proves on a few tokens that the model honours
    our mask, positions and cache, and refuses it otherwise.
    """

    has_blocks = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self._shape = self._probe()
        self._prove_trees()

    def cache_shape(self) -> CacheShape:
        return self._shape

    def embed(self, span: Span) -> Tensor:
        raise self._no_blocks()

    def layers(self, *args: object, **kwargs: object) -> Tensor:
        raise self._no_blocks()

    def features(self, hidden: Tensor) -> Tensor:
        raise self._no_blocks()

    def logits(self, features: Tensor) -> Tensor:
        raise self._no_blocks()

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Tensor | None = None,
        keep: int = 0,
    ) -> PassOutput:
        if start or self.num_layers in taps:  # what the model reports last has passed the final norm
            raise self._no_blocks()
        out = self.model(
            input_ids=span.ids,
            # Explicit: left out, the model would build one from its own idea of the cache's length.
            attention_mask=span.mask(self.dtype, explicit=True),
            position_ids=span.positions.clamp(max=self.context - 1),
            past_key_values=CacheWindow(cache, span),
            use_cache=True,
            output_hidden_states=bool(taps),
            logits_to_keep=keep,
        )
        return PassOutput(out.logits, {tap: out.hidden_states[tap] for tap in taps})

    def _prefill_pass(self, span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
        return self.forward(span, cache, taps, keep=1).taps

    def _no_blocks(self) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.config.model_type} models run through their whole forward only: drafters that need the model's "
            f"layers one by one, or the input of its final norm, support {', '.join(FAMILIES)}"
        )

    @torch.inference_mode()
    def _probe(self) -> CacheShape:
        """The shape of the model's cache, learned from one token."""
        try:
            cache = self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=True).past_key_values
            shapes = {(*layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in cache.layers}
        except Exception as error:
            raise UnsupportedModel(
                f"{self.config.model_type} models keep no key/value cache we know: {error}"
            ) from error
        if len(shapes) != 1 or (shape := shapes.pop())[:2] != shape[2:]:
            raise UnsupportedModel(f"{self.config.model_type}: key/value shapes that differ by layer are not supported")
        return CacheShape(len(cache.layers), shape[0], shape[1])

    @torch.inference_mode()
    def _prove_trees(self) -> None:
        """A two-branch tree behind a prefix must give what each branch gives alone."""
        prefix, branches = [1, 2, 3], [[4, 5], [4, 6]]
        cache = self.new_cache(1, 8)
        try:
            self.prefill(prefix, cache)
            tree = torch.tensor([[4, 5, 6]], device=self.device)
            ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=self.device)
            depths = torch.tensor([[0, 1, 1]], device=self.device)
            got = self.forward(Span(tree, cache.lengths.copy(), 0, depths, ancestors), cache).logits[0, 1:]
            want = torch.stack(
                [self.model(torch.tensor([prefix + branch], device=self.device)).logits[0, -1] for branch in branches]
            )
        except Exception as error:
            raise UnsupportedModel(f"{self.config.model_type} models cannot run token trees: {error}") from error
        # Tight, since a wrong position changes little over so short a prefix: what rounding explains and no more.
        rounding = max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        if not (got - want).abs().max() <= rounding * (want.max() - want.min()):
            raise UnsupportedModel(
                f"{self.config.model_type} models do not honour a tree mask and positions: drafts cannot be verified"
            )


def _matrices(model: PreTrainedModel) -> list[Tensor]:
    """The weights a pass reads in full: not the tables it looks rows up in, nor vectors, which weigh nothing."""
    output = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} - {id(output)}
    return [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables]


def _refuse_windows(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds - {"full_attention", "global"} or (window and not kinds):
        raise UnsupportedModel(
            f"{config.model_type} with sliding-window or other non-full attention is not supported yet"
            + (f" (sliding_window={window}; config.sliding_window=None turns it off)" if window else "")
        )


def as_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """The reference target of a Hugging Face model.

    Raises:
        UnsupportedModel: sliding-window or stateful attention, flash attention, or a model that cannot run trees.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{model.config.model_type} is an encoder-decoder, not a causal LM")
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"attention implementation '{model.config._attn_implementation}' takes no tree mask: "
            "load the model with attn_implementation='sdpa'"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no output matrix: it is not a causal LM")
    _refuse_windows(model)
    model.eval()
    family = FAMILIES.get(model.config.model_type)
    return (BlockTarget if family and hasattr(model, family.decoder) else WholeTarget)(model, tokenizer)
