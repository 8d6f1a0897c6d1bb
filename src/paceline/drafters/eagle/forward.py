"""EAGLE's heads at work: step by step, over a KV cache of their own that follows the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafters.eagle.fused_head import Eagle3Head, WideLayer
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.eagle.waiting import Taps, Waiting
from paceline.drafting.base import Row
from paceline.drafting.output_rows import output_rows
from paceline.drafting.own_layers import fast_layers, fast_linear
from paceline.targets.cache import KVCache
from paceline.targets.linear import linear_module
from paceline.targets.span import Span
from paceline.targets.target import Target

if TYPE_CHECKING:
    from paceline.drafters.eagle.native_step import NativeSteps
    from paceline.targets.native.target import Ranked

    Made = tuple[Float[Tensor, "batch width hidden"], Float[Tensor, "batch last tokens"] | None, Ranked | None]

ALONG = 4  # tokens that a row may catch up with in the pass over its root
TAIL = 16  # most tokens that are read at once: of a long prompt, or when drafting was not asked for, only the last ones
MOST = TAIL + ALONG  # tokens whose hidden states are needed of a prompt


class Guessed(NamedTuple):
    states: Float[Tensor, "batch width hidden"]  # from which the next step goes on
    logits: Float[Tensor, "batch width tokens"]  # of the tokens that can be drafted
    ranked: Ranked | None = None  # what was told of them besides


class EagleForward:
    """What `EagleHead.forward` or `Eagle3Head.forward` computes, on the target's own tier.

    Each slot of a row of the cache holds what the head reads at one position: the target's hidden states there and the
    next token. After the root stands what comes of states that the head guesses, until the next round. The first slot
    need not be the first position: positions count from what the head has read first.

    `row.state.waiting` are hidden states of the target that the head has not read (`Waiting`).

    Args:
        top: how many of the likeliest tokens to tell, where the logits come with them.

    Attributes:
        taps: which of the target's hidden states it reads.
        shallow: of which of them the next token comes in as its own; 0: it comes in as its embedding.
        count: decoder layers.
        layers: the head's own, behind the block view: its final norm and, unless these are all of the target's, the
            rows of its output matrix come with them.
    """

    def __init__(self, head: EagleHead | Eagle3Head, target: Target, top: int = 1) -> None:
        self.target, self.count, self.top = target, head.config.layers, top
        self.fc = fast_linear(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach(), target)
        self.token_norm: nn.Module | None = None  # of EAGLE-3: of what its first layer reads beside the state,
        self.state_norm: nn.Module = nn.Identity()  # and of the state that passes by it, where that is normed
        self.token_in: Callable[[Tensor], Tensor] | None = None  # where the token is added to the state
        self.taps = fused = head.reads or (target.num_layers,)
        self.shallow = head.shallow
        if isinstance(head, Eagle3Head):
            fused, self.token_norm = tuple(head.config.taps), head.entry_norm
            if head.token_in is not None:
                self.token_in, self._normed = fast_linear(head.token_in.weight.detach(), None, target), head.normed
            self._take_layers(head)
        self._fused = [self.taps.index(tap) for tap in fused]
        rows = self._rows(head)
        unused = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
        head.lm.set_output_embeddings(linear_module(unused if rows is None else rows))
        self.layers = fast_layers(head.lm, target)
        self._every = rows is None
        self._steps = self._native_steps(head)
        self.cache: KVCache

    def _native_steps(self, head: EagleHead | Eagle3Head) -> NativeSteps | None:
        """None: a step is made of parts."""
        if self.layers.tier != "native" or (self.token_norm is not None and self.token_in is None):
            return None
        from paceline.drafters.eagle.native_step import NativeSteps

        layers: Any = self.layers
        target: Any = self.target
        fc: Any = self.fc
        token_in: Any = self.token_in
        return NativeSteps(head, layers, target, fc, token_in)

    def _take_layers(self, head: Eagle3Head) -> None:
        """Make the head's modules ones that tiers take over."""
        first, norm = head.decoder.layers[0], head.norm
        if isinstance(first, WideLayer):
            if first.norm_first:
                self.state_norm, first.input_layernorm, first.norm_first = first.input_layernorm, nn.Identity(), False
            if self.target.tier != "reference":
                head.decoder.layers[0] = first.plain()
        head.decoder.norm = type(first.post_attention_layernorm)(len(norm.weight), eps=norm.eps)
        head.decoder.norm.weight = norm.weight

    def _rows(self, head: EagleHead | Eagle3Head) -> Float[Tensor, "vocab hidden"] | None:
        """The output matrix for the tokens that can be drafted; None: the target's, all of it."""
        if not head.shares_output:
            assert head.matrix is not None  # it was loaded with the head
            return head.matrix.to(self.target.device, self.target.dtype)
        return None if head.tokens is None else output_rows(self.target, head.tokens)

    def start(self, batch: int, capacity: int) -> None:
        self.cache = self.layers.new_cache(batch, capacity + ALONG)

    def begin(self, row: Row) -> None:
        """A request joins. All that waits is read when its first draft is asked for."""
        self.cache.lengths[row.slot] = 0

    def starts(self, rows: int) -> np.ndarray:
        """Where the trees of the first rows begin in the cache: the slots of their roots."""
        starts: np.ndarray = np.maximum(self.cache.lengths[:rows] - 1, 0)
        return starts

    def roots(self, rows: Sequence[Row], tokens: Float[Tensor, "batch 1 hidden"] | None = None) -> Guessed:
        """What is guessed at the roots, once what waits has been read.

        Args:
            tokens: the roots' own states, of a head that reads these.
        """
        self.catch_up(rows)
        news = [self._taken(row) for row in rows]
        cache, counts = self.cache.rows(0, len(rows)), [len(new[0]) for new in news]
        # Of a prompt of one token, or one that another request has read, there is nothing: it is a blind guess,
        # whose slot the truth gets.
        width = max(1, *counts)
        hidden = [_side_by_side(of_tap, width) for of_tap in zip(*news, strict=True)]
        ids = [(row.ids[-max(count, 1) :] + [0] * width)[:width] for row, count in zip(rows, counts, strict=True)]
        span = Span(torch.from_numpy(np.array(ids)).to(self.target.device), cache.lengths.copy())
        if tokens is not None:
            own = [self._tokens(new, root) for new, root in zip(news, tokens, strict=True)]
            tokens = _side_by_side(own, width)
        states, logits, ranked = self._read(hidden, span, cache, tokens, last=1 if len(rows) == 1 else 0)
        for row, count in enumerate(counts):
            cache.lengths[row] += count
        if logits is not None:
            return Guessed(states[:, -1:], logits, ranked)
        states = states[range(len(rows)), [max(count - 1, 0) for count in counts]][:, None]
        return Guessed(states, self.head(states))

    def nodes(self, states: Float[Tensor, "batch width hidden"], span: Span, tokens: Tensor | None = None) -> Guessed:
        """What is guessed at nodes of the trees, from the states guessed at their parents; `tokens` as of `roots`."""
        states, logits, ranked = self._run(states, span, self.cache.rows(0, span.batch), tokens, last=span.width)
        assert logits is not None
        return Guessed(states, logits, ranked)

    def features(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """What the output matrix reads of guessed states."""
        return self.layers.features(states)

    def head(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.target.logits(self.features(states)) if self._every else self.layers.head(states)

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Of the rows that are drafted for, read what waits but the last tokens, which are read with the root."""
        for row in rows:
            waiting = len(row.state.waiting)
            if row.room > 0 and waiting > ALONG:
                self._read_waiting(row, waiting - ALONG)

    @staticmethod
    def _taken(row: Row) -> Taps:
        """What waits, and no longer does; nothing of a row that is not drafted for."""
        waiting: Waiting = row.state.waiting
        return waiting.take(None if row.room > 0 else 0)

    def _read_waiting(self, row: Row, count: int) -> None:
        """Read the first `count` of what waits, or only the last of them."""
        own, end = self.cache.rows(row.slot, row.slot + 1), len(row.ids) - len(row.state.waiting) + count
        if count > TAIL:
            own.lengths[0] = 0
        taken = row.state.waiting.take(count)
        tokens = self._tokens(taken, row.state.waiting.first(self.shallow))[None, -TAIL:] if self.shallow else None
        pieces = [tap[None, -TAIL:] for tap in taken]
        length = pieces[0].shape[1]
        ids = torch.tensor([row.ids[end - length : end]], device=self.target.device)
        self._read(pieces, Span(ids, own.lengths.copy()), own, tokens)
        own.lengths += length

    def _tokens(self, taken: Taps, after: Float[Tensor, "1 hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The own states of the tokens that follow those taken; `after`: of the last of them."""
        return torch.cat([taken[self.taps.index(self.shallow)][1:], after])

    def _read(
        self,
        taps: Sequence[Float[Tensor, "batch width hidden"]],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        """After tokens whose hidden states are known; see `_run`. The target's feature stands for a guessed state, or
        several of its states, fused.
        """
        if self._steps:
            fused, asked = [taps[at] for at in self._fused], 0 if self._every else last
            return self._with_logits(*self._steps.roots(fused, span, cache, asked, self.top, tokens), last)
        if self.token_norm is None:
            return self._run(self.target.features(taps[0]), span, cache, tokens, last)
        hidden = torch.cat([taps[at] for at in self._fused], -1)
        if self.token_in is not None:
            hidden = self._normed(hidden)
        return self._run(self.fc(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1), span, cache, tokens, last)

    def _run(
        self,
        states: Float[Tensor, "batch width hidden"],
        span: Span,
        cache: KVCache,
        tokens: Tensor | None = None,
        last: int = 0,
    ) -> Made:
        """The head's states, and logits of the `last` nodes: of a single row, or of all nodes in several."""
        if self._steps:
            asked = 0 if self._every else last
            return self._with_logits(*self._steps.nodes(states, span, cache, asked, self.top, tokens), last)
        return self._with_logits(self._by_parts(states, span, cache, tokens), None, last)

    def _with_logits(self, states: Float[Tensor, "batch width hidden"], ranked: Ranked | None, last: int) -> Made:
        if ranked:
            return states, ranked.logits, ranked
        return states, self.head(states[:, -last:]) if last else None, None

    def _by_parts(
        self, states: Float[Tensor, "batch width hidden"], span: Span, cache: KVCache, tokens: Tensor | None
    ) -> Float[Tensor, "batch width hidden"]:
        embedded = self.target.embed(span) if tokens is None else tokens
        if self.token_norm is None:
            entered, beside = self.fc(torch.cat([embedded, states], -1).flatten(0, 1)).view(*states.shape), None
        elif self.token_in is not None:
            token = self.token_in(self.token_norm(embedded).flatten(0, 1))
            entered, beside = states + token.view(*states.shape), None
        else:
            entered, beside = self.state_norm(states), self.token_norm(embedded)
        return self.layers.layers(entered, span, cache, 0, self.count, beside=beside)


def _side_by_side(rows: Sequence[Float[Tensor, "tokens hidden"]], width: int) -> Float[Tensor, "batch width hidden"]:
    """Rows of different lengths as a batch, filled up with zeros."""
    if len(rows) == 1 and len(rows[0]) == width:
        return rows[0][None]
    return torch.stack([nn.functional.pad(row, (0, 0, 0, width - len(row))) for row in rows])
