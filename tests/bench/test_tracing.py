"""What the rounds of a run say of passes that begin late."""

from __future__ import annotations

import pytest

from paceline.bench.tracing import TimedPass, _share


def test_the_share_of_a_pass_that_is_left() -> None:
    whole = [TimedPass(width, 10, 1.0 + width, 0.0) for width in (1, 2, 3) for _ in range(12)]
    late = [TimedPass(2, 20, 1.5, 0.0)] * 12 + [TimedPass(1, 20, 9.0, 0.0)] * 12 + [TimedPass(3, 20, 0.1, 0.0)]
    assert _share(late, whole) == pytest.approx(0.5)  # of width 2: one of width 1 is whole, a single one says little
    assert _share([], whole) == 1.0
