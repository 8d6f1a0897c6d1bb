"""The cache of models whose layers keep a state of all that came before: recurrences and convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from paceline.targets.cache import CacheWindow
from paceline.targets.layered import LayeredCache, Layout, Rings

if TYPE_CHECKING:
    import torch

    from paceline.targets.span import Span

try:
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:  # pragma: no cover  # vLLM 0.32 wants transformers below 5.20, where no layer is one
    DummyLayer = LinearAttentionLayer  # type: ignore[assignment,misc]

#: Accepted tokens that passes read again before they are read into the state by a pass of their own: a pass costs about
#: as much as ten to twenty tokens more in another.
MOST_PENDING = 16


class LayerState(NamedTuple):
    """What one layer keeps, by number and `[batch, ...]` each: of its convolutions, and of its recurrences."""

    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]

    @property
    def parts(self) -> Iterator[Tensor]:
        yield from self.conv.values()
        yield from self.recurrent.values()

    def rows(self, start: int, stop: int) -> LayerState:
        """A view."""
        conv, recurrent = ({number: part[start:stop] for number, part in kind.items()} for kind in self)
        return LayerState(conv, recurrent)


States = Mapping[int, LayerState]  # by layer; those that keep none are left out


class Pass(NamedTuple):
    """What a pass over some rows read, and the states that it came to."""

    ids: list[list[int]]  # by row: the tokens that were new
    again: list[int]  # by row: the pending tokens in front of them
    states: States


class RowStates:
    """The states of a cache's rows, each at one of the row's committed tokens; shared by the views of its rows.

    A state cannot be taken back. So a pass works on a copy, which becomes the state if all that the row has read turns
    out right. Else the accepted tokens are `pending`: committed, but not in the state, and read again by later passes.

    Args:
        initial: the states of one row before its first token.
    """

    def __init__(self, initial: States, batch: int) -> None:
        self._initial = initial
        self._now = {
            index: LayerState(
                *({n: part.repeat(batch, *[1] * (part.dim() - 1)) for n, part in kind.items()} for kind in state)
            )
            for index, state in initial.items()
        }
        self.pending: list[list[int]] = [[] for _ in range(batch)]
        self.last: Pass | None = None

    def rows(self, start: int, stop: int) -> States:
        """Views of some rows' states."""
        return {index: state.rows(start, stop) for index, state in self._now.items()}

    def take(self, row: int, states: States) -> None:
        """Let these, of one row, be the states of a row; nothing is pending."""
        for index, state in states.items():
            for part, new in zip(self._now[index].parts, state.parts, strict=True):
                part[row].copy_(new[0])
        self.pending[row] = []

    def clear(self, row: int) -> None:
        self.take(row, self._initial)

    def move(self, source: int, target: int) -> None:
        pending = self.pending[source]
        self.take(target, self.rows(source, source + 1))
        self.pending[target] = list(pending)

    def commit(self, first: int, paths: Sequence[Sequence[int]]) -> None:
        """Of what the last pass read, over rows from `first` on, these nodes are right."""
        if self.last is None:
            raise ValueError("a commit follows a pass")
        ids, again, states = self.last
        for row, path in enumerate(paths):
            if len(path) == len(ids[row]) and again[row] == max(again):  # else there is padding after it
                self.take(first + row, {index: state.rows(row, row + 1) for index, state in states.items()})
            else:
                self.pending[first + row] += [ids[row][node] for node in path]
        self.last = None


class StateCache(LayeredCache):
    """Keys and values, and states."""

    def __init__(
        self, rings: Rings, lengths: np.ndarray, states: RowStates, first: int = 0, owner: LayeredCache | None = None
    ) -> None:
        super().__init__(rings, lengths, first, owner)
        self.states = states

    @classmethod
    def allocate_states(
        cls, layout: Layout, states: States, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> StateCache:
        """As `LayeredCache.of`; `states` are those of one row before its first token."""
        rings = Rings(layout, batch, capacity + MOST_PENDING, dtype, device)  # rows with less to read again are padded
        return cls(rings, np.zeros(batch, dtype=np.int64), RowStates(states, batch))

    @property
    def capacity(self) -> int:
        return super().capacity - MOST_PENDING

    @property
    def num_layers(self) -> int:
        return max(super().num_layers, *(index + 1 for index in self.states.rows(0, 1)))

    @property
    def pending(self) -> list[list[int]]:
        """By row: committed tokens that are not in its state."""
        return self.states.pending[self.first_row : self.first_row + self.batch]

    def rows(self, start: int, stop: int) -> StateCache:
        if (start, stop) == (0, self.batch):
            return self
        return StateCache(self._rings, self.lengths[start:stop], self.states, self.first_row + start, self._owner)

    def reserve(self, nodes: int) -> None:
        # A pass begins with the pending tokens, and sees what a window before these holds.
        pending = np.array([len(tokens) for tokens in self.states.pending])
        self._rings.reserve(nodes, self._owner.lengths - pending)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        super().commit(paths)
        self.states.commit(self.first_row, paths)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.states.move(self.first_row + source, self.first_row + target)

    def clear(self) -> None:
        super().clear()
        for row in range(self.first_row, self.first_row + self.batch):
            self.states.clear(row)

    def window(self, span: Span) -> StateWindow:
        return StateWindow(self, span, self.states.rows(self.first_row, self.first_row + span.batch))


class StateWindow(CacheWindow):
    """One pass's view of a StateCache, with a copy of the states to work on."""

    def __init__(self, cache: StateCache, span: Span, states: States) -> None:
        super().__init__(cache, span)
        self.layers = [_layer(states[i]) if i in states else DummyLayer() for i in range(cache.num_layers)]

    @property
    def states(self) -> States:
        """What the pass came to."""
        return {
            index: LayerState(
                {n: part for n, part in layer.conv_states.items() if part is not None},
                {n: part for n, part in layer.recurrent_states.items() if part is not None},
            )
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionLayer)
        }


def _layer(state: LayerState) -> LinearAttentionLayer:
    """A copy, in the form Hugging Face modules expect, as if tokens had come before."""
    count = max((*state.conv, *state.recurrent)) + 1
    layer = LinearAttentionLayer(number_of_states=count)
    layer.has_previous_state = dict.fromkeys(range(count), True)
    for number, part in state.conv.items():
        layer.conv_states[number], layer.conv_kernel_size[number] = part.clone(), part.shape[-1]
        layer.is_conv_states_initialized[number] = True
    for number, part in state.recurrent.items():
        layer.recurrent_states[number] = part.clone()
        layer.is_recurrent_states_initialized[number] = True
    return layer
