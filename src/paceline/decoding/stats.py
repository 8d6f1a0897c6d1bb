"""What a generation did: a record a round, the provenance of every token, and the field's metrics over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.clock import now

PHASES = ("draft", "verify", "sample", "other")
TARGET = "target"  # the source of tokens that nobody drafted


@dataclass(slots=True)
class Round:
    """One round of one request. `seconds` are wall time of the whole batch's round, by phase."""

    drafted: int  # nodes of the tree, its root aside
    depth: int  # its longest path
    accepted: int  # drafted tokens that became output
    emitted: int  # accepted ones and the target's own, less those after a stop
    seconds: dict[str, float]


@dataclass
class Stats:
    """Metrics of one request (EESD, Liu et al., 2024, eq. 11 and 12; vLLM's names where it has them)."""

    prompt_tokens: int = 0
    rounds: list[Round] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # who proposed each output token
    prefill_seconds: float = 0.0
    seconds: float = 0.0  # wall time from joining the batch to the last token, prefill included
    reused_tokens: int = 0  # of the prompt, which an earlier one had begun with as well

    @property
    def tokens(self) -> int:
        return len(self.sources)

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def tau(self) -> float:
        """Mean tokens per target pass."""
        return self.tokens / len(self.rounds) if self.rounds else 0.0

    @property
    def v_d(self) -> float:
        """Accepted / drafted tokens (EESD eq. 11)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def r_d(self) -> float:
        """Accepted / output tokens (EESD eq. 12)."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def split(self) -> dict[str, float]:
        """Seconds by phase, prefill aside."""
        return {phase: sum(r.seconds[phase] for r in self.rounds) for phase in PHASES}

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "rounds": len(self.rounds),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tau": self.tau,
            "v_d": self.v_d,
            "r_d": self.r_d,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_s": self.tokens_per_s,
            "split": self.split,
        }


class Clock:
    """Splits a round's wall time into phases."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = now()

    def lap(self, phase: str) -> None:
        time = now()
        self.seconds[phase] += time - self._last
        self._last = time
