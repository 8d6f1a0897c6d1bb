"""Shared by tests of drafters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.targets.native import storage
from paceline.targets.native.weights import Kind


@pytest.fixture(scope="session", autouse=True)
def finely_rounded() -> Iterator[None]:
    """Heads of random weights are compared with what they are rounded to, and 4 bits leave little to compare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ROUNDED", Kind.Q8_0)
        yield
