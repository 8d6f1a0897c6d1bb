"""Keys and values of texts that were decoded, for prompts that begin as they do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.decoding.blocks import Hidden, TokenBlocks
from paceline.drafting.lookup import common_length
from paceline.errors import require

if TYPE_CHECKING:
    from paceline.decoding.request import Request
    from paceline.targets.cache import KVCache

LEAST = 8  # tokens worth copying: nearly all chats have a few in common


class Kept(NamedTuple):
    """A text that was decoded.

    Attributes:
        blocks: where its keys, values and hidden states are.
        taps: the hidden states that drafters want of every token of a prompt.
    """

    ids: list[int]
    blocks: list[int]
    taps: frozenset[int]


class Reused(NamedTuple):
    """How much of a prompt was found, and the hidden states that come with it."""

    tokens: int
    hidden: Hidden


NOTHING = Reused(0, {})


class PrefixStore:
    """The latest texts that were decoded, the last used last; when there is no more room the oldest goes.

    Caches of windows and recurrent states forget beginnings: nothing is kept of them.
    What is reused has the bits that reading it again would give, wherever the target is exact.

    Args:
        tokens: most tokens kept, of all texts together; each takes as much memory as in the KV cache.

    Raises:
        OptionError: `tokens` is below 1.
    """

    def __init__(self, tokens: int) -> None:
        require(tokens >= 1, f"a store of prefixes needs room for at least 1 token, not {tokens}")
        self.limit, self.hits, self.queries = tokens, 0, 0  # tokens found and asked for, of all prompts
        self._kept: list[Kept] = []
        self._blocks = TokenBlocks(tokens)
        self._traces: dict[Request, list[Hidden]] = {}  # hidden states of those that decode

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return sum(len(kept.ids) for kept in self._kept)

    def restore(self, ids: Sequence[int], row: KVCache, taps: Collection[int]) -> Reused:
        """Copy the longest known beginning of `ids` into an empty one-row cache.

        Args:
            taps: of the hidden states that are needed with it.
        """
        if row.forgets:
            return NOTHING
        self.queries += len(ids)
        able = [kept for kept in self._kept if kept.taps.issuperset(taps)]
        common = {index: common_length(ids, kept.ids) for index, kept in enumerate(able)}
        best = max(common, key=lambda index: common[index], default=0)
        if not common or (count := common[best]) < LEAST:
            return NOTHING
        kept = able[best]
        self._kept = [*(other for other in self._kept if other is not kept), kept]
        self.hits += count
        return Reused(count, self._blocks.get(kept.blocks, count, row, taps))

    # -- requests that decode --------------------------------------------------------------------------------------
    def begin(self, request: Request, hidden: Hidden) -> None:
        """Its prompt has been read; `hidden` are the drafter's taps of it."""
        self._traces[request] = [hidden]

    def extend(self, request: Request, hidden: Hidden) -> None:
        """The tokens that a round committed."""
        if hidden:
            self._traces[request].append(hidden)

    def end(self, request: Request, row: KVCache) -> None:
        """Keep a request's text, whose keys and values are in `row`."""
        trace = self._traces.pop(request)
        if row.forgets:
            return
        ids = request.ids[: int(row.lengths[0])]
        if len(ids) > self.limit or any(common_length(ids, kept.ids) == len(ids) for kept in self._kept):
            return
        hidden = {tap: torch.cat([part[tap] for part in trace])[: len(ids)] for tap in trace[0]}
        for kept in [kept for kept in self._kept if common_length(kept.ids, ids) == len(kept.ids)]:
            self._forget(kept)  # this one continues it
        while self.tokens + len(ids) > self.limit or not self._blocks.fits(len(ids)):
            self._forget(self._kept[0])
        self._kept.append(Kept(ids, self._blocks.put(row, len(ids), hidden), frozenset(hidden)))

    def _forget(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._blocks.give_back(kept.blocks)

    def allocate(self, cache: KVCache) -> None:
        """Take the memory for keys and values now, not as texts come."""
        if not cache.forgets:
            self._blocks.take_all(cache)

    def drop(self, request: Request) -> None:
        """A request failed: nobody knows what is in its row."""
        self._traces.pop(request, None)
