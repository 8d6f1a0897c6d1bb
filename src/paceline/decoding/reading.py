"""A prompt being read, a chunk at a time between the rounds of others."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from paceline.clock import now
from paceline.decoding.prefixes import NOTHING, PrefixStore
from paceline.targets.target import PREFILL_CHUNK, joined

if TYPE_CHECKING:
    from paceline.decoding.request import Request
    from paceline.targets.cache import KVCache
    from paceline.targets.target import Target

LONG, TAIL = 256, 32  # tokens that are worth two passes: one of the last `TAIL`, whose last hidden states are wanted


class Reading:
    """A request whose prompt is being read into a row of the cache. The last token is left for the first round.

    Where a pass takes less if nobody wants its last hidden states (`Target.ends_early`), those of a long prompt are
    computed for its last tokens only.

    Args:
        row: of the cache, where nobody else is.
        taps: hidden states wanted of the prompt.
        kept_taps: those of them that are wanted of every token, not of the last ones only.
        prefixes: where the prompt's beginning may be known.
    """

    def __init__(
        self,
        target: Target,
        request: Request,
        row: int,
        cache: KVCache,
        taps: Collection[int],
        kept_taps: Collection[int],
        prefixes: PrefixStore | None,
    ) -> None:
        request.joined = now()
        self.target, self.request, self.row, self.cache = target, request, row, cache
        self.taps, self._kept_taps = taps, kept_taps
        self.ids = request.ids[:-1]
        cache.clear()
        reused = NOTHING
        if prefixes:
            shown = request.policy.reads_hidden  # the last token's state: that one is read in any case
            reused = prefixes.restore(self.ids[: len(self.ids) - shown], cache, kept_taps)
        self.done = reused.tokens
        self._hidden = [reused.hidden] if reused.tokens else []
        last = target.num_layers
        self._apart = target.ends_early and last in taps and last not in kept_taps
        request.stats.reused_tokens = reused.tokens
        request.stats.prefill_seconds = now() - request.joined

    @property
    def left(self) -> int:
        """Tokens to read."""
        return len(self.ids) - self.done

    @property
    def chunk(self) -> int:
        """Tokens of the next read."""
        left = self.left - TAIL if self._apart and self.left >= LONG else self.left
        return min(left, PREFILL_CHUNK)

    def read(self) -> None:
        """The next chunk."""
        began = now()
        stop = self.done + self.chunk
        taps = self._kept_taps if self._apart and stop < len(self.ids) else self.taps
        self._hidden.append(self.target.prefill(self.ids[self.done : stop], self.cache, taps))
        self.done = stop
        self.request.stats.prefill_seconds += now() - began

    def hidden(self) -> dict[int, Float[Tensor, "tokens hidden"]]:
        """The taps of all that was read, and of what was reused where every token is wanted."""
        return {tap: joined([part[tap] for part in self._hidden if tap in part]) for tap in self.taps}
