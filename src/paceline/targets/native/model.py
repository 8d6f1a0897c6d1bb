"""A model packed for the C++ pass, called on tensors. The structures mirror native.h, as those of structures.py do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.targets.native.build import library
from paceline.targets.native.structures import CCall, CEntry, CNorm, CSpan, c_matrix, c_norm
from paceline.targets.native.weights import CMatrix, Kind, Packed, pointer

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache
    from paceline.targets.native.rough import Rough
    from paceline.targets.parts import Norm
    from paceline.targets.rope import RopeTables
    from paceline.targets.span import Span


class CExperts(ctypes.Structure):
    _fields_ = (
        ("router", CMatrix),
        ("gate_up", ctypes.POINTER(CMatrix)),
        ("down", ctypes.POINTER(CMatrix)),
        ("shared_gate", CMatrix),
    )


NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "query_norm", "key_norm")


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("experts", CExperts),
        *((name, CNorm) for name in NORMS),
        ("sinks", ctypes.c_void_p),
        ("rope", ctypes.c_int32),
        ("window", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Sizes:
    """The numbers of native.h's `Model`, in its order; a linear layer alone has none but `hidden`."""

    hidden: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rotary: int = 0  # dimensions of a head that are rotated
    inner: int = 0  # of an MLP, at most
    activation: int = 0  # an index of ACTIVATIONS
    gated: int = 1
    parallel: int = 0
    norm_whole: int = 0
    norm_each: int = 0
    norm_rotated: int = 0
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    normalised: int = 0
    ragged: int = 0
    scale: float = 1.0
    score_cap: float = 0.0
    residual_scale: float = 1.0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")
NO_TOKEN, NO_MEMORY = 0, 2  # of library.cpp
_TYPES: dict[str, Any] = {"int": ctypes.c_int32, "float": ctypes.c_float}


class CModel(ctypes.Structure):
    _fields_ = (
        *((number.name, _TYPES[str(number.type)]) for number in fields(Sizes)),
        ("layers", ctypes.POINTER(CLayer)),
        ("norm", CNorm),
        ("head", CMatrix),
    )


@dataclass(frozen=True)
class ExpertWeights:
    """A layer's mixture of experts; the MLP beside it, if there is one, is all tokens'."""

    router: Packed
    gate_up: tuple[Packed, ...]  # interleaved
    down: tuple[Packed, ...]
    shared_gate: Packed | None

    def matrices(self, chosen: int | None = None) -> tuple[Packed, ...]:
        """All, or those that one token passes."""
        gate = [self.shared_gate] if self.shared_gate else []
        return self.router, *self.gate_up[:chosen], *self.down[:chosen], *gate

    def c(self) -> CExperts:
        gate_up, down = ((CMatrix * len(some))(*(one.c for one in some)) for some in (self.gate_up, self.down))
        return CExperts(self.router.c, gate_up, down, c_matrix(self.shared_gate))


@dataclass(frozen=True)
class LayerWeights:
    qkv: Packed
    out: Packed
    gate_up: Packed | None  # interleaved, where there is a gate; None: there are only experts
    down: Packed | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    experts: ExpertWeights | None = None
    sinks: Float[Tensor, " heads"] | None = None
    rope: int = 0  # which of the tables of angles; -1: none
    window: int = 0  # tokens that a token sees, itself included; 0: all

    def matrices(self, chosen: int | None = None) -> tuple[Packed, ...]:
        """All, or those that one token passes."""
        return *self.dense(), *(self.experts.matrices(chosen) if self.experts else ())

    def dense(self, beside_experts: bool = True) -> tuple[Packed, ...]:
        """All but those of experts; with or without the MLP that stands beside experts."""
        mlp = (self.gate_up, self.down) if beside_experts or not self.experts else ()
        return tuple(matrix for matrix in (self.qkv, self.out, *mlp) if matrix)

    def c(self) -> CLayer:
        return CLayer(
            *(c_matrix(matrix) for matrix in (self.qkv, self.out, self.gate_up, self.down)),
            self.experts.c() if self.experts else CExperts(),
            *(c_norm(getattr(self, name)) for name in NORMS),
            pointer(self.sinks),
            self.rope,
            self.window,
        )


@dataclass(frozen=True)
class Entry:
    """What makes that which enters the first layer: the tokens' embeddings, or what a matrix makes of them and of
    states.

    Attributes:
        embedding: of all tokens.
        scale: of embeddings.
        norm: of them, before the matrix.
        matrix: over `[embedding | state]` where they are `joined`; else over embeddings, and the state is added.
        piece_norm: of each of the pieces that a state is given in.
        fuse: makes one state of the pieces; None: there is one.
    """

    embedding: Packed
    scale: float = 1.0
    norm: Norm | None = None
    matrix: Packed | None = None
    joined: bool = False
    piece_norm: Norm | None = None
    fuse: Packed | None = None

    @cached_property
    def made(self) -> CEntry:
        """Points into all of them; tokens and states are a pass's own."""
        of_tokens = ctypes.addressof(self.embedding.c), None, None, self.scale, c_norm(self.norm), c_matrix(self.matrix)
        return CEntry(*of_tokens, self.joined, 0, None, c_norm(self.piece_norm), c_matrix(self.fuse))


class NativeModel:
    """The weights of a model, or of some layers, and what runs them.

    Attributes:
        outputs: of the output matrix.
        norm: the final one.
        rough: of the output matrix, where a pass can tell the likeliest tokens without all logits.
    """

    def __init__(
        self,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        norm: Norm | None,
        head: Packed,
        rough: Rough | None = None,
    ) -> None:
        self.sizes = sizes
        self.outputs, self.norm = head.outputs, norm
        self._layers = (CLayer * len(layers))(*(layer.c() for layer in layers))
        self._keep = (layers, norm, head)  # the C structures point into them
        self._c, self._without_norm = (
            ctypes.byref(CModel(*astuple(sizes), self._layers, last, head.c)) for last in (c_norm(norm), CNorm())
        )
        self._library = library()
        self.rough = rough

    def __getstate__(self) -> dict[str, Any]:
        layers, norm, head = self._keep
        return {"sizes": self.sizes, "layers": layers, "norm": norm, "head": head, "rough": self.rough}

    def __setstate__(self, state: dict[str, Any]) -> None:
        NativeModel.__init__(self, **state)

    def round_inputs(self, kind: Kind = Kind.Q8_0) -> bool:
        """From now on products with weights in blocks round their inputs (see `Packed.round_inputs`); but not in MLPs
        with experts. False where no matrix is stored so.
        """
        layers, norm, head = self._keep
        rounded = [matrix.round_inputs(kind) for layer in layers for matrix in layer.dense(beside_experts=False)]
        rounded.append(head.round_inputs(kind))
        NativeModel.__init__(self, self.sizes, layers, norm, head)
        return any(rounded)

    @property
    def windows(self) -> list[int]:
        """By layer: how many tokens a token sees, itself included; 0: all."""
        return [layer.window for layer in self._layers]

    @windows.setter
    def windows(self, windows: Sequence[int]) -> None:
        for layer, window in zip(self._layers, windows, strict=True):
            layer.window = window

    @property
    def matrices(self) -> list[Packed]:
        """All, each of a chain by itself, the head last."""
        layers, _, head = self._keep
        return [*(part for layer in layers for matrix in layer.matrices() for part in matrix.chain), head]

    @property
    def read(self) -> list[Packed]:
        """What a pass over one token reads: of experts, as many as it chooses."""
        layers, _, head = self._keep
        chosen = self.sizes.chosen
        return [*(part for layer in layers for matrix in layer.matrices(chosen) for part in matrix.chain), head]

    def run(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        span: Span,
        ropes: Sequence[RopeTables],
        cache: KVCache,
        start: int,
        stop: int,
        *,
        context: int,
        entry: Entry | None = None,
        states: Sequence[Float[Tensor, "tokens hidden"]] = (),
        own: Float[Tensor, "tokens hidden"] | None = None,
        skip: bytes | None = None,
        unread: bool = False,
        packed: bool = False,
        beside: Float[Tensor, "tokens hidden"] | None = None,
        taps: Mapping[int, Float[Tensor, "tokens hidden"]] | None = None,
        logits: Float[Tensor, "last vocab"] | None = None,
        likeliest: Int[Tensor, "last top"] | None = None,
        logps: Float[Tensor, "last top"] | None = None,
        entropies: Float[Tensor, " last"] | None = None,
    ) -> None:
        """Layers `start .. stop-1`, in place over `hidden`; writes the tokens' keys and values. All tensors are
        contiguous.

        Args:
            ropes: the tables of angles that layers name.
            context: positions end here.
            entry: makes what enters of the span's tokens and the pieces of `states`; `hidden` need not hold anything.
            own: what stands for the embeddings of these tokens, where `entry` has a matrix.
            skip: two flags a layer of the range: leave out its attention, its MLP.
            packed: leave out the span's padding; tensors are of its `tokens` then.
            unread: nothing reads what leaves the last layer. It stores keys and values only.
            beside: what the attention of layer `start` reads besides, see `Target.layers`.
            taps: filled with what enters these layers, which are above `start` and at most `stop`.
            logits: filled with those of the last tokens: final norm and output matrix.
            likeliest: filled with the largest of each of these, of equal ones the first one first. Without logits,
                where it has `rough`, those of all tokens: the first of the largest.
            logps, entropies: filled with their log-probabilities, and the entropy in nats. More than one are told with
                these only.

        Raises:
            IndexError: a token that is not there.
            MemoryError: there is no room for what the pass works with; another one may run.
        """
        ids, starts = span.ids.contiguous(), np.ascontiguousarray(span.starts, np.int64)
        depths, ancestors = (None if part is None else part.contiguous() for part in (span.depths, span.ancestors))
        call = CCall()
        place = ids.shape[0], ids.shape[1], span.offset, context, starts.ctypes.data
        counts = span.counts if packed else None
        call.span = CSpan(*place, pointer(depths), pointer(ancestors), None if counts is None else counts.ctypes.data)
        call.threads, call.first, call.last, call.unread = torch.get_num_threads(), start, stop, unread
        tables = [(rope.cos, rope.sin) for rope in ropes]  # held until the end: another thread may grow them
        for at, (cosine, sine) in enumerate(tables):
            call.cosine[at], call.sine[at] = cosine.data_ptr(), sine.data_ptr()
        addresses = cache.addresses
        call.cache = addresses.ctypes.data
        if entry:
            call.entry = entry.made
            pieces = (ctypes.c_void_p * len(states))(*(state.data_ptr() for state in states))
            call.entry.ids, call.entry.pieces, call.entry.states = ids.data_ptr(), len(states), ctypes.addressof(pieces)
            call.entry.own = pointer(own)
        if taps:
            leaving = (ctypes.c_void_p * (stop - start))()
            for tap, tapped in taps.items():
                if tap > start:
                    leaving[tap - start - 1] = tapped.data_ptr()
            call.taps = ctypes.addressof(leaving)
        if skip:
            call.skip = ctypes.cast(ctypes.c_char_p(skip), ctypes.c_void_p)
        if logits is not None:
            tokens = span.tokens if packed else ids.numel()
            call.logits, call.logits_from = logits.data_ptr(), tokens - len(logits)
        call.beside, call.hidden = pointer(beside), hidden.data_ptr()
        if likeliest is not None:
            call.top, call.likeliest = likeliest.shape[-1], likeliest.data_ptr()
            call.logps, call.entropies = pointer(logps), pointer(entropies)
            if logits is None and self.rough:
                call.rough = ctypes.addressof(self.rough.c)
        outcome = self._library.paceline_pass(self._c, ctypes.byref(call))
        if outcome == NO_TOKEN:
            raise IndexError("a token is not in the vocabulary")
        _check_memory(outcome)

    def head(self, hidden: Float[Tensor, "tokens hidden"], normed: bool = False) -> Float[Tensor, "tokens vocab"]:
        """Final norm, unless it is `normed` already, and output matrix; `hidden` contiguous."""
        logits = torch.empty(len(hidden), self.outputs)
        model, threads = self._without_norm if normed else self._c, torch.get_num_threads()
        _check_memory(self._library.paceline_head(model, hidden.data_ptr(), len(hidden), threads, logits.data_ptr()))
        return logits


def _check_memory(outcome: int) -> None:
    if outcome == NO_MEMORY:
        raise MemoryError("there is no memory left for this pass: a shorter context or fewer rows at once need less")
