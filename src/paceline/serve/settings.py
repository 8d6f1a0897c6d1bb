"""How a server behaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.errors import require

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it


@dataclass(frozen=True)
class Settings:
    """How a server behaves.

    Attributes:
        rows: most requests decoded at a time.
        context: most tokens of a request, prompt and output; 0: as many as the model has.
        queue: most requests that wait for a row; more are refused.
        keep: tokens whose keys and values are kept for prompts that begin alike; 0: none.
        timeout: seconds that a request may take in all.
        drain: seconds that requests have to end after the server is told to stop.
        keys: API keys; none: all may come in.
        origins: whose pages may call it (CORS).
        body: most bytes of a request's body.
        name: what requests call the model; default its own name.
    """

    rows: int = 4
    context: int = 0
    queue: int = 64
    keep: int = 8192
    timeout: float = 600.0
    drain: float = 30.0
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    body: int = 4 * 2**20
    name: str = ""

    def __post_init__(self) -> None:
        """Raises OptionError for a value out of range."""
        require(self.rows >= 1, f"rows must be at least 1, not {self.rows}")
        for name in ("context", "queue", "keep"):
            require(getattr(self, name) >= 0, f"{name} must not be below 0")
        require(all(key.strip() for key in self.keys), "an API key must not be empty")
        require(all(key.isascii() for key in self.keys), "an API key has ASCII characters only: others cannot be sent")
        for origin in self.origins:
            told = f"an origin is * or as in https://example.org:8080, not '{origin}'"
            require(origin in ("*", "null") or _ORIGIN.fullmatch(origin) is not None, told)
        for name in ("timeout", "drain", "body"):
            require(0 < getattr(self, name) < inf, f"{name} must be above 0, and finite")
