"""The torch tier on a GPU: passes of a few tokens replayed as CUDA graphs.

A decoding pass is some hundred kernels of a few microseconds each, which Python launches more slowly than the GPU runs
them. A graph launches all at once, but over fixed addresses and shapes: so passes are padded to one of a few widths,
their inputs copied into static tensors, and attention reads the cache's whole capacity, masked.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.targets.cache import KVCache
from paceline.targets.families import FAMILIES
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target
from paceline.targets.torch_tier import TorchTarget, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class StaticSpan(Span):
    """A tree whose place and shape stand in tensors, so that nothing of it is frozen into a graph."""

    def __init__(self, ids: Tensor, first: Tensor, depths: Tensor, ancestors: Tensor, capacity: int) -> None:
        super().__init__(ids, np.zeros(len(ids), dtype=np.int64), 0, depths, ancestors)
        self.__dict__["first"] = first  # fills the cached property
        self._capacity = capacity

    @property
    def end(self) -> int:
        return self._capacity


class StaticCache(KVCache):
    """The same storage, written by index wherever the span's tensors say, and read as a whole."""

    def write(self, layer: int, span: Span, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.arange(span.batch, device=keys.device)[:, None]
        for store, new in zip(self.store[layer], (keys, values), strict=True):
            store[row, :, span.slots] = new.transpose(1, 2)
        return self.store[layer, 0], self.store[layer, 1]


class StaticPass:
    """A pass of one batch and width over one cache, from a layer on, from static inputs to static outputs."""

    def __init__(self, target: TorchTarget, cache: KVCache, width: int, start: int, taps: Collection[int]) -> None:
        self.target, self.taps, self.width, self.start = target, taps, width, start
        self.cache = StaticCache(cache.store, cache.lengths)
        device, self.chain_loaded = target.device, False
        self.ids = torch.zeros(cache.batch, width, dtype=torch.long, device=device)
        self.first = torch.zeros(cache.batch, dtype=torch.long, device=device)
        self.depths = torch.zeros_like(self.ids)
        self.ancestors = torch.zeros(cache.batch, width, width, dtype=torch.bool, device=device)
        self.chain = torch.arange(width, device=device)
        size = target.config.hidden_size
        self.hidden = torch.zeros(cache.batch, width, size, dtype=target.dtype, device=device) if start else None

    def __call__(self, span: Span, hidden: Tensor | None) -> PassOutput:
        self._load(span)
        if self.hidden is not None:
            assert hidden is not None
            self.hidden[:, : span.width].copy_(hidden)
        out = self._execute()
        # Copies: the next pass overwrites the outputs, which drafters may keep for longer.
        taps = {tap: hidden[:, : span.width].clone() for tap, hidden in out.taps.items()}
        return PassOutput(out.logits[:, : span.width].clone(), taps)

    def _load(self, span: Span) -> None:
        width = span.width
        self.ids[:, :width].copy_(span.ids)
        self.first.copy_(span.first)
        if span.depths is None or span.ancestors is None:
            if not self.chain_loaded:
                self.depths.copy_(self.chain.expand_as(self.depths))
                self.ancestors.copy_((self.chain <= self.chain[:, None]).expand_as(self.ancestors))
            self.chain_loaded = True
            return
        self.chain_loaded = False
        self.depths.zero_()
        self.depths[:, :width].copy_(span.depths)
        self.ancestors.zero_()
        self.ancestors[:, :, 0] = True  # padding sees the root
        self.ancestors[:, :width, :width].copy_(span.ancestors)

    def _run(self) -> PassOutput:
        # A new span each time: what it caches must be computed by the pass, not found there.
        span = StaticSpan(self.ids, self.first, self.depths, self.ancestors, self.cache.capacity)
        return TorchTarget.forward(self.target, span, self.cache, self.taps, self.start, self.hidden)

    def _execute(self) -> PassOutput:
        return self._run()


class GraphPass(StaticPass):
    """The same, captured at its first call and replayed from then on."""

    graph: torch.cuda.CUDAGraph | None = None
    _tables: Sequence[tuple[Tensor, Tensor]] = ()

    def _execute(self) -> PassOutput:
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        return self.out

    def _capture(self) -> None:
        """Inputs must be loaded: the warm-up pass writes into the cache, where the real one then writes the same."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._run()
        self._tables = [(rope.cos, rope.sin) for rope in self.target.ops.ropes]  # read at replay, though they are grown


class LentCache(KVCache):
    """A cache whose storage is lent again once it has gone, with all views of its rows."""

    owner: KVCache | None = None

    def rows(self, start: int, stop: int) -> KVCache:
        view = LentCache(self.store[:, :, start:stop], self.lengths[start:stop])
        view.owner = self
        return view


class GraphStorage(NamedTuple):
    store: Tensor
    user: weakref.ref[KVCache]
    passes: dict[tuple[object, ...], StaticPass]  # graphs hold addresses: they live and die with the storage


class GraphTarget(TorchTarget):
    """A torch target whose `forward` replays graphs. Prompts, passes inside the draft region and passes wider than the
    widest graph run as ever.
    """

    make_pass: type[StaticPass] = GraphPass

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(model, tokenizer)
        self._storages: dict[int, GraphStorage] = {}

    def forward(
        self,
        span: Span,
        cache: KVCache,
        taps: Collection[int] = (),
        start: int = 0,
        hidden: Tensor | None = None,
    ) -> PassOutput:
        storage = self._storages.get(cache.store.untyped_storage().data_ptr())
        width = next(iter(WIDTHS[bisect_left(WIDTHS, span.width) :]), None)
        if storage is None or width is None or span.offset or int(span.starts.max()) + width > cache.capacity:
            return super().forward(span, cache, taps, start, hidden)
        key = (cache.store.data_ptr(), cache.batch, width, start, *sorted(taps))
        if key not in storage.passes:
            storage.passes[key] = self.make_pass(self, cache, width, start, taps)
        return storage.passes[key](span, hidden)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        capacity = -(-(capacity + WIDTHS[-1]) // 64) * 64  # room for padding; aligned for the mask of fused attention
        for at, storage in list(self._storages.items()):
            if storage.user() is None:
                if storage.store.shape[2] == batch and capacity <= storage.store.shape[4] <= 2 * capacity:
                    return self._lend(storage.store, storage.passes)
                del self._storages[at]
        # One tensor, windows or not: a graph reads all slots, at places that it knows.
        return self._lend(Target.new_cache(self, batch, capacity).store, {})

    def _lend(self, store: Tensor, passes: dict[tuple[object, ...], StaticPass]) -> KVCache:
        cache = LentCache(store, np.zeros(store.shape[2], dtype=np.int64))
        self._storages[store.untyped_storage().data_ptr()] = GraphStorage(store, weakref.ref(cache), passes)
        return cache


def make_graph_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> TorchTarget:
    """The torch tier's target on a GPU; takes the model's weights over. Without graphs where tokens choose experts, as
    what runs then depends on them. Raises UnsupportedModel as `make_torch_target` does.
    """
    check_model(model)
    experts = FAMILIES[model.config.model_type].experts
    return TorchTarget(model, tokenizer) if experts else GraphTarget(model, tokenizer)
