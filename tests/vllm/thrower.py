"""A proposer that fails: for each text that begins with POISON all the time, and altogether at every FIFTH step."""

from __future__ import annotations

from typing import Any

from paceline.integrations.vllm import Proposer

POISON = 11  # token id
FIFTH = 5


class Thrower(Proposer):
    """See above."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.steps = 0
        lookup, propose = self.rounds.source.lookup, self.rounds.propose
        observed = lookup.observe

        def observe(ids: list[int], memory: Any) -> None:
            if ids[0] == POISON:
                raise RuntimeError("a poisoned text")
            observed(ids, memory)

        def throw(*arguments: Any) -> list[list[int]]:
            self.steps += 1
            if self.steps % FIFTH == 0:
                raise RuntimeError("a step that fails")
            return propose(*arguments)

        lookup.observe = observe  # type: ignore[method-assign]
        self.rounds.propose = throw  # type: ignore[method-assign]
