"""`told`: what the user sees of a failure is one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def told(error: type[Exception], says: str | None = None) -> Iterator[None]:
    """The body raises `error`, and its message is one line matching the pattern `says`."""
    with pytest.raises(error, match=says) as info:
        yield
    text = str(info.value)
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
