"""A cache that is somebody else's."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from paceline.targets.cache import KVCache


class BorrowedCache:
    """The target's cache, as a drafter that works on it remembers it: when the engine gives it back it is free, though
    the drafter is not told.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = ref(cache)

    def __call__(self) -> KVCache:
        found = self._cache()
        assert found is not None, "a drafter is asked while its engine has a cache"
        return found
