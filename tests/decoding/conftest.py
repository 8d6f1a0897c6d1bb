"""The round is tested on tiny models."""

from helpers import one_thread  # noqa: F401
