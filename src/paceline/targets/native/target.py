"""The native tier: the model families of the table on CPU, by one C++ call per range of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import exp, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from paceline.errors import OptionError
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.described import check_described, refuse
from paceline.targets.native.build import library
from paceline.targets.native.memory import Arena
from paceline.targets.native.model import Entry
from paceline.targets.native.packing import pack
from paceline.targets.native.weights import Kind
from paceline.targets.parts import ModelParts
from paceline.targets.reference import check_supported
from paceline.targets.rope import RopeTables
from paceline.targets.sliding import fitting_cache
from paceline.targets.target import PassOutput, Target, check_taps

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.span import Span

MAX_HEAD_DIM = 256  # of attention.cpp


class Ranked(NamedTuple):
    """What a head says at some nodes."""

    logits: Float[Tensor, "batch width vocab"]
    likeliest: Int[Tensor, "batch width top"]  # of the largest, of equal ones the first one first
    logps: Float[Tensor, "batch width top"]  # their log-probabilities
    entropies: Float[Tensor, "batch width"]  # in nats


class NativeTarget(Target):
    """Packs the model's weights and takes them away from it. Computes in float32; for a model in bfloat16 the matrix
    products round their inputs to it, as Hugging Face's do, and only those: sums, norms, attention and the residual
    stream stay in float32. `in_bfloat16` does the same to a model that stays in blocks.

    A token's result has the same bits whatever stands beside it in the pass, and with any number of threads: greedy
    speculative decoding is then plain decoding, bit for bit.

    Args:
        storage: see `Storage`.

    Raises:
        NativeUnavailable: the C++ code cannot be built here.
        UnsupportedModel: not of a known family, or with parts that the pass does not have.
        OptionError: unknown storage, or one that needs a GGUF file.
    """

    tier = "native"
    exact = True
    exactness = "every sum has one fixed order"
    packs = True
    ends_early = True

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, storage: str = "auto"
    ) -> None:
        super().__init__(model, tokenizer)
        check_model(model)  # before anything is compiled for a model that cannot run
        library()
        self.dtype = torch.float32
        self.compute_dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        parts = ModelParts(model)
        self._shape = CacheShape(self.num_layers, parts.kv_heads, parts.head_dim)
        self._ropes = [RopeTables(rotary, self.dtype, self.device, self.context) for rotary in parts.rotaries.values()]
        self._scale = parts.embedding_factor
        source = Path(self.config.name_or_path or "?", "source.gguf")
        self.native, self._embedding = pack(parts, storage, self.compute_dtype, source)
        self.weight_bytes = sum(matrix.bytes for matrix in self.native.read)
        if self.native.sizes.experts:
            self.weight_count = sum(matrix.outputs * matrix.c.inputs for matrix in self.native.read)

    @property
    def greedy_weight_count(self) -> int:
        head = self.native.matrices[-1]
        return self.weight_count - (head.outputs * head.c.inputs if self.native.rough else 0)

    @property
    def greedy_weight_bytes(self) -> int:
        rough = self.native.rough
        return self.weight_bytes + (rough.matrix.bytes - self.native.matrices[-1].bytes if rough else 0)

    def in_int8(self) -> NativeTarget:
        """This target, whose matrix products with weights in blocks round their inputs to 8 bits from now on.

        Raises:
            OptionError: no weights are in blocks.
        """
        if self.compute_dtype != torch.float32 or not self.native.round_inputs(Kind.Q8_0):
            raise OptionError(f"int8 is for models with weights in blocks, from a GGUF file: {self.name} has none")
        self.compute_dtype = torch.int8
        return self

    def in_bfloat16(self) -> NativeTarget:
        """This target, whose matrix products with weights in blocks round their inputs to bfloat16 from now on, where
        there are any. The weights stay what they are.
        """
        if self.compute_dtype == torch.float32 and self.native.round_inputs(Kind.BF16):
            self.compute_dtype = torch.bfloat16
        return self

    @property
    def windows(self) -> list[int]:
        return self.native.windows

    @windows.setter
    def windows(self, windows: Sequence[int]) -> None:
        self.native.windows = windows

    # -- the block view --------------------------------------------------------------------------------------------
    def embed(self, span: Span) -> Float[Tensor, "batch width hidden"]:
        rows = self._embedding.rows(span.ids.flatten()).view(*span.ids.shape, -1)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    @cached_property
    def entry(self) -> Entry:
        """What makes that which enters the first layer."""
        return Entry(self._embedding, self._scale)

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
        beside: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
        unread: bool = False,
    ) -> Float[Tensor, "batch width hidden"]:
        """See `Target.layers`. `taps` is filled with what enters these layers, above `start` and up to `stop`. What is
        `unread` is not computed.
        """
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # the pass works in place
        flags = bytes((i, part) in skip for i in range(start, stop) for part in ("attention", "mlp")) if skip else None
        other = None if beside is None else beside.contiguous()
        self._run(hidden, span, cache, start, stop, skip=flags, beside=other, taps=taps, unread=unread)
        return hidden

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Float[Tensor, "batch width hidden"] | None = None,
    ) -> PassOutput:
        """See `Target.forward`; in one call."""
        return self._pass(span, cache, taps, start, hidden, rough=False)

    def forward_greedy(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Float[Tensor, "batch width hidden"] | None = None,
    ) -> PassOutput:
        """See `Target.forward_greedy`; where that can be (likeliest.cpp says how)."""
        return self._pass(span, cache, taps, start, hidden, rough=self.native.rough is not None)

    def _pass(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int],
        start: int,
        hidden: Tensor | None,
        rough: bool,
    ) -> PassOutput:
        """Without padding where the pass begins with tokens; if `rough`, logits wait until they are asked for."""
        check_taps(taps, start)
        if hidden is None and start in taps:
            hidden = self.embed(span)
        packed = hidden is None and span.counts is not None
        size = (span.tokens,) if packed else span.ids.shape
        shape = *size, self.config.hidden_size
        moving = torch.empty(shape) if hidden is None else hidden.clone(memory_format=torch.contiguous_format)
        tapped = _room_for(taps, start, hidden, shape)
        likeliest = torch.empty(size, dtype=torch.int64)
        logits = None if rough else torch.empty(*size, self.native.outputs)
        entry, outputs = self.entry if hidden is None else None, {"logits": logits, "likeliest": likeliest[..., None]}
        self._run(moving, span, cache, start, self.num_layers, entry=entry, taps=tapped, packed=packed, **outputs)
        said = (lambda: self.head(moving)) if logits is None else logits
        return PassOutput(said, tapped, likeliest, span.firsts if packed else None)

    def _prefill_pass(self, span: Span, cache: KVCache, taps: Collection[int]) -> dict[int, Tensor]:
        """Of a prompt, later tokens read keys and values, and drafters what is tapped."""
        check_taps(taps, 0)
        hidden = self.embed(span)
        tapped = _room_for(taps, 0, hidden, hidden.shape)
        self.layers(hidden, span, cache, 0, self.num_layers, taps=tapped, unread=self.num_layers not in taps)
        return tapped

    def _layers_tapped(
        self, hidden: Tensor, span: Span, cache: KVCache, start: int, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        tapped = _room_for(taps, start, hidden, hidden.shape)
        return self.layers(hidden, span, cache, start, self.num_layers, taps=tapped), tapped

    def step(
        self,
        entry: Entry,
        states: Sequence[Float[Tensor, "batch width hidden"]],
        span: Span,
        cache: KVCache,
        last: int,
        top: int = 1,
        own: Float[Tensor, "batch width hidden"] | None = None,
    ) -> tuple[Float[Tensor, "batch width hidden"], Ranked | None]:
        """What leaves the last layer, and logits, where `entry` makes what enters the first of tokens and states: a
        draft step of a head, which has no embeddings of its own.

        Args:
            states: the pieces of each.
            last: how many nodes have logits: the last ones of a single row, all, or none.
            top: how many of the likeliest tokens are told.
            own: states of the tokens' own, which come in in place of their embeddings.
        """
        hidden = torch.empty(*span.ids.shape, self.config.hidden_size)
        own = None if own is None else own.contiguous()
        read: dict[str, Any] = {"entry": entry, "states": [state.contiguous() for state in states], "own": own}
        size = span.batch, last
        if not last:
            self._run(hidden, span, cache, 0, self.num_layers, **read)
            return hidden, None
        logits = torch.empty(*size, self.native.outputs)
        likeliest, logps = torch.empty(*size, top, dtype=torch.int64), torch.empty(*size, top)
        made = Ranked(logits, likeliest, logps, torch.empty(size))
        self._run(hidden, span, cache, 0, self.num_layers, **read, **made._asdict())
        return hidden, made

    def _run(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        *,
        logits: Tensor | None = None,
        **rest: Any,
    ) -> None:
        cache.place(span)
        for rope in self._ropes:
            rope.grow(span.end)
        rows = None if logits is None else logits.view(-1, self.native.outputs)
        self.native.run(hidden, span, self._ropes, cache, start, stop, context=self.context, logits=rows, **rest)

    def features(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        norm, size = self.native.norm, (hidden.shape[-1],)
        if norm is None:
            return hidden
        if norm.centred:
            return functional.layer_norm(hidden, size, norm.weight, norm.bias, norm.eps)
        return functional.rms_norm(hidden, size, norm.weight, norm.eps)

    def logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(features, normed=True)

    def head(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self._head(hidden, normed=False)

    def _head(self, hidden: Tensor, normed: bool) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self.native.head(rows, normed).view(*hidden.shape[:-1], self.native.outputs)

    def judge(self, logits: Float[Tensor, " tokens"]) -> tuple[int, float, float]:
        """See `Target.judge`."""
        logits = logits.float().contiguous()  # a draft model's may be of any kind
        likeliest, told = np.empty(1, np.int64), np.empty(2, np.float32)
        at = told.ctypes.data
        library().paceline_judge(logits.data_ptr(), len(logits), likeliest.ctypes.data, at, at + told.itemsize)
        return int(likeliest[0]), exp(told[0]), float(told[1])

    def draw(self, scores: Float[Tensor, " tokens"], quantile: float, temperature: float = 1.0) -> int:
        """See `Target.draw`."""
        scores = scores.float().contiguous()  # someone's own processor may have made doubles of them
        token: int = library().paceline_draw(scores.data_ptr(), len(scores), 1.0 / temperature, quantile)
        if token < 0:
            raise MemoryError("there is no memory left to draw a token")
        return token

    def cache_shape(self) -> CacheShape:
        return self._shape

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        def zeros(size: Sequence[int]) -> Tensor:  # a cache of a long context streams like weights
            return Arena().take(4 * prod(size)).view(torch.float32).view(size)

        return fitting_cache(self._shape, self.windows, batch, capacity, zeros)


def check_model(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for what this tier, or no tier, runs."""
    check_described(model, "native")
    check_supported(model)
    parts = ModelParts(model)
    size, rotary = parts.head_dim, parts.rotary
    refuse(
        "native",
        {
            f"head size {size}, of it {rotary} rotated": size > MAX_HEAD_DIM or size % 2 or rotary > size,
            f"device {model.device}": model.device.type != "cpu",
            "float64 (it computes in float32)": model.dtype == torch.float64,
        },
    )


def _room_for(taps: Collection[int], start: int, hidden: Tensor | None, shape: Sequence[int]) -> dict[int, Tensor]:
    """Where a pass from layer `start` on, which `hidden` enters, copies what is tapped to."""
    return {tap: hidden if tap == start and hidden is not None else torch.empty(shape) for tap in taps}
