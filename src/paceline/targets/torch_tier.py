"""The torch tier: the model's arithmetic over fused and prepacked weights, without Hugging Face's modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.targets import fused
from paceline.targets.cache import CacheShape, KVCache
from paceline.targets.linear import PackedLinear, PlainLinear, can_pack, make_width_independent
from paceline.targets.plain_ops import PlainOps
from paceline.targets.reference import check_supported
from paceline.targets.rope import RopeTables
from paceline.targets.sliding import fitting_cache
from paceline.targets.target import PassOutput, Target, check_taps

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.fused import FusedLayer, Weights
    from paceline.targets.parts import Norm
    from paceline.targets.span import Span


class Operations(Protocol):
    """What lies between the matrix products of a layer."""

    @property
    def exact(self) -> bool: ...

    @property
    def ropes(self) -> Sequence[RopeTables]: ...

    def plan(self, span: Span, cache: KVCache, packed: bool = False) -> Any:
        """What `attend` wants to know of a pass, made once for all layers.

        Args:
            packed: the flow has no rows for the span's padding; only where operations are `exact`.
        """

    def forget(self) -> None:
        """Layers have other windows now: keep nothing that was made of them."""

    def norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor: ...

    def together(self, plan: Any, flow: Tensor, start: int, stop: int, taps: Mapping[int, Tensor], /) -> Tensor | None:
        """Whole layers in one call: what the last one adds to the flow; None where that cannot be, and nothing is done.

        Args:
            taps: filled with what enters these layers, which lie between the first and the last.
        """

    def goes_whole(self, rows: int, /) -> bool:
        """Whether a pass of so many rows may be asked of `whole`."""

    def whole(self, plan: Any, flow: Tensor, start: int, taps: Mapping[int, Tensor], /) -> Tensor:
        """All layers from `start` on, one or more, the final norm and the output matrix in one call: what the matrix
        gives. `flow` becomes what leaves the last layer; `taps` as of `together`.
        """

    def attend(self, plan: Any, cache: KVCache, layer: FusedLayer, index: int, qkv: Tensor) -> Tensor: ...

    def activate(self, up: Tensor) -> Tensor: ...


class TorchTarget(Target):
    """Models of the families that `fused.check` lets through. On CPU in float32 a token's result does not depend on
    the pass it is part of, to the last bit (`exact`): chunks, trees and batches give what one token at a time gives.

    Args:
        exact: False leaves what lies between the matrix products to torch's own operations there, too.
    """

    tier = "torch"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, exact: bool = True
    ) -> None:
        super().__init__(model, tokenizer)
        pack = self.device.type == "cpu" and self.dtype == torch.float32 and can_pack()
        self.weights = weights = fused.absorb(model, PackedLinear if pack else PlainLinear)
        ropes = [RopeTables(rotary, self.dtype, self.device, self.context) for rotary in weights.rotaries]
        why_not = _why_not(self) if exact else "torch's own attention was asked for"
        self.ops = _operations(exact=not why_not)(weights, ropes, self.context)
        self.exact: bool = self.ops.exact
        self.packs = self.exact
        self.exactness = why_not or "prepacked products and attention sum in an order that no other token changes"
        self.weight_bytes = sum(linear.bytes for linear in weights.read)
        if any(layer.experts for layer in weights.layers):
            self.weight_count = sum(linear.weights for linear in weights.read)
        self._plan: Any = None

    @property
    def windows(self) -> list[int]:
        return [layer.window for layer in self.weights.layers]

    @windows.setter
    def windows(self, windows: Sequence[int]) -> None:
        for layer, window in zip(self.weights.layers, windows, strict=True):
            layer.window = window
        self.ops.forget()

    def cache_shape(self) -> CacheShape:
        shape = self.weights.shape
        return CacheShape(self.num_layers, shape.kv_heads, shape.head_dim)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        return fitting_cache(self.cache_shape(), self.windows, batch, capacity, zeros)

    def embed(self, span: Span) -> Float[Tensor, "batch width hidden"]:
        return self.weights.embed(span.ids.reshape(-1)).view(*span.ids.shape, -1)

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Tensor | None = None,
    ) -> PassOutput:
        """See `Target.forward`; hidden states without padding are `[tokens, hidden]`."""
        packed = hidden is None and span.counts is not None and self.packs
        if packed:
            hidden = self.weights.embed(span.ids[torch.from_numpy(span.inside)])
        elif hidden is None:
            hidden = self.embed(span)
        if start < self.num_layers and self.ops.goes_whole(hidden.shape[:-1].numel()):
            logits, tapped = self._at_once(hidden, span, cache, taps, start)
        else:
            left, tapped = self._through(span, cache, taps, start, hidden)
            logits = self.head(left)
        return PassOutput(logits, tapped, firsts=span.firsts if packed else None)

    def _at_once(
        self, hidden: Tensor, span: Span, cache: KVCache, taps: Collection[int], start: int
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass in one call, from what enters layer `start`: logits, and what enters the layers of `taps`."""
        check_taps(taps, start)
        flow, inner = self._flow(hidden, taps, start)
        logits = self.ops.whole(self._planned(span, cache, hidden.dim() == 2), flow, start, inner)
        logits = self.weights.adjust(logits).view(*hidden.shape[:-1], -1)
        return logits, self._tapped(hidden, flow, inner, taps, start)

    def _flow(self, hidden: Tensor, taps: Collection[int], start: int) -> tuple[Tensor, dict[int, Tensor]]:
        """What layers change, and where what enters those of `taps` inside will be put."""
        flow = hidden.reshape(-1, hidden.shape[-1]).clone()  # the caller keeps its own: it may be a tap
        return flow, {tap: torch.empty_like(flow) for tap in taps if start < tap < self.num_layers}

    def _tapped(
        self, hidden: Tensor, left: Tensor, inner: Mapping[int, Tensor], taps: Collection[int], start: int
    ) -> dict[int, Tensor]:
        found = dict(inner) | {start: hidden, self.num_layers: left}
        return {tap: found[tap].view(hidden.shape) for tap in taps}

    def layers(
        self,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]] = (),
        beside: Tensor | None = None,
    ) -> Tensor:
        plan = self._planned(span, cache, packed=hidden.dim() == 2)
        flow = hidden.reshape(-1, hidden.shape[-1]).clone()  # the caller keeps its own: it may be a tap
        delta = None if skip or beside is not None else self.ops.together(plan, flow, start, stop, {})
        if delta is None:
            delta = self._one_by_one(plan, cache, flow, start, stop, skip, beside)
        return (flow if delta is None else flow.add_(delta)).view(hidden.shape)

    def _layers_tapped(
        self, hidden: Tensor, span: Span, cache: KVCache, start: int, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        last = self.num_layers
        if not any(start < tap < last for tap in taps):
            return super()._layers_tapped(hidden, span, cache, start, taps)
        flow, inner = self._flow(hidden, taps, start)
        delta = self.ops.together(self._planned(span, cache, hidden.dim() == 2), flow, start, last, inner)
        if delta is None:
            return super()._layers_tapped(hidden, span, cache, start, taps)
        left = flow.add_(delta)
        return left.view(hidden.shape), self._tapped(hidden, left, inner, taps, start)

    def _one_by_one(
        self,
        plan: Any,
        cache: KVCache,
        flow: Tensor,
        start: int,
        stop: int,
        skip: Collection[tuple[int, str]],
        beside: Tensor | None,
    ) -> Tensor | None:
        """Layers over the flow, which changes: what the last one adds to it."""
        ops, parallel = self.ops, self.weights.shape.parallel
        delta = None  # what the last sublayer gave; the next norm adds it to the flow
        for index in range(start, stop):
            layer = self.weights.layers[index]
            attention, mlp = (index, "attention") not in skip, (index, "mlp") not in skip
            if parallel and mlp:
                entered = ops.norm(flow, delta, layer.mlp_norm)
                transformed, delta = self._transform(layer, entered), None
            if attention:
                entered = ops.norm(flow, delta, layer.attention_norm)
                if beside is not None and index == start:
                    entered = torch.cat([entered, beside.reshape(entered.shape)], -1)
                attended = layer.out(ops.attend(plan, cache, layer, index, layer.qkv(entered)))
                delta = self._added(attended, layer.attention_post_norm)
            if parallel and mlp:
                delta = transformed if delta is None else delta.add_(transformed)
            elif mlp:
                entered = ops.norm(flow, delta, layer.mlp_norm)
                delta = self._transform(layer, entered)
        return delta

    def _transform(self, layer: FusedLayer, entered: Tensor) -> Tensor:
        out = None if layer.up is None or layer.down is None else layer.down(self.ops.activate(layer.up(entered)))
        if experts := layer.experts:
            routed = experts(entered, self.ops.activate)
            out = routed if out is None else routed.add_(experts.gated(entered, out))
        assert out is not None
        return self._added(out, layer.mlp_post_norm)

    def _added(self, out: Tensor, post_norm: Norm | None) -> Tensor:
        """What a sublayer adds, from what its last matrix gives."""
        if post_norm is not None:
            out = self.ops.norm(out, None, post_norm)
        scale = self.weights.shape.residual_scale
        return out if scale == 1.0 else out.mul_(scale)

    def features(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self.ops.norm(rows, None, self.weights.norm).view(hidden.shape)

    def logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        rows = features.reshape(-1, features.shape[-1]).contiguous()
        logits = self.weights.adjust(self.weights.head(rows))
        return logits.view(*features.shape[:-1], -1)

    def _planned(self, span: Span, cache: KVCache, packed: bool = False) -> Any:
        """The plan of this span over this cache, kept for the span's next call."""
        cache.place(span)
        if self._plan is None or self._plan[0] is not span or self._plan[1:3] != (cache.key, packed):
            self._plan = (span, cache.key, packed, self.ops.plan(span, cache, packed))
        return self._plan[3]


def _why_not(target: TorchTarget) -> str:
    """Why the pass cannot be exact; empty where it can."""
    if target.device.type != "cpu" or target.dtype != torch.float32:
        return f"{str(target.dtype).removeprefix('torch.')} on {target.device.type}: only float32 on the CPU is"
    from paceline.targets import team  # numba takes half a second to import
    from paceline.targets.compact import has_room

    shapes: dict[tuple[tuple[int, ...], bool], list[PackedLinear]] = defaultdict(list)
    for linear in target.weights.linears:
        if isinstance(linear, PackedLinear):
            shapes[linear.shape, linear.bias is None].append(linear)
    if not shapes:
        return "this torch has no prepacked products for this CPU"
    copies = has_room(sum(linear.bytes for linear in target.weights.linears))
    if not all(make_width_independent(alike, copies) for alike in shapes.values()):
        return "this CPU's prepacked products depend on the width of the pass"
    return "" if team.available() else "this torch's threads cannot run the exact attention"


def _operations(exact: bool) -> Callable[[Weights, Sequence[RopeTables], int], Operations]:
    if not exact:
        return PlainOps
    from paceline.targets.exact_ops import ExactOps

    return ExactOps


def check_model(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel for what no tier runs, or only the reference tier."""
    check_supported(model)
    fused.check(model)


def make_torch_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, exact: bool = True
) -> Target:
    """A target that takes the model's weights over: its own forward raises ModelError from now on.

    Args:
        exact: see `TorchTarget`.

    Raises:
        UnsupportedModel: a family, activation or other feature that only the reference tier runs.
    """
    check_model(model)
    return TorchTarget(model, tokenizer, exact)


#: Torch's own operations throughout, though results then depend on the width of the pass.
make_inexact_torch_target = partial(make_torch_target, exact=False)
