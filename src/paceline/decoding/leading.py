"""Which engine a drafter follows: its buffers are made for one cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, ref

from paceline.errors import require

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter


class Leader(Protocol):
    @property
    def busy(self) -> bool:
        """Whether it decodes, or will go on to, so that no other may lead."""
        ...


_leaders: WeakKeyDictionary[Drafter, ref[Leader]] = WeakKeyDictionary()


def leads(leader: Leader, drafter: Drafter) -> bool:
    """Whether the drafter, with all that it is made of, follows this leader."""
    return all(_leader(part) is leader for part in _with_parts(drafter))


def take_lead(leader: Leader, drafter: Drafter) -> None:
    """From now on the drafter follows this leader. Raises OptionError while another one decodes with it."""
    for part in _with_parts(drafter):
        other = _leader(part)
        require(
            other is None or other is leader or not other.busy,
            "another engine is decoding with this drafter: wait until it is done, or make a drafter for each engine",
        )
    for part in _with_parts(drafter):
        _leaders[part] = ref(leader)


def _leader(drafter: Drafter) -> Leader | None:
    known = _leaders.get(drafter)
    return known() if known else None


def _with_parts(drafter: Drafter) -> Iterator[Drafter]:
    yield drafter
    for part in drafter.parts:
        yield from _with_parts(part)
