"""What stop predictors learn from: drafted tokens, as a policy sees them, with the target's verdicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.api import LLM
from paceline.decoding.request import Request
from paceline.drafters.skip_set import model_key
from paceline.errors import DataError, DiskFull
from paceline.policies.base import StoppingPolicy
from paceline.policies.predictors import Seen, signals
from paceline.registry import Spec, require
from paceline.targets.store import is_full

HEADER = "paceline"


@dataclass
class Examples:
    """Drafted tokens that the target judged: of each round those up to the first that it rejected.

    Attributes:
        prompt: index of the prompt that a token was drafted for.
        facts: what they were made with.
    """

    signals: Float[Tensor, "tokens signals"]
    depth: Int[Tensor, " tokens"]
    accepted: Bool[Tensor, " tokens"]
    prompt: Int[Tensor, " tokens"]
    target: Float[Tensor, "tokens width"] | None = None
    draft: Float[Tensor, "tokens draft_width"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.depth)

    def seen(self, rows: Tensor, device: torch.device | str = "cpu") -> Seen:
        """Some of them, as predictors take them."""

        def part(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows].to(device).float()

        return Seen(self.signals[rows].to(device), self.depth[rows].to(device), part(self.target), part(self.draft))

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises DiskFull."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(columns, partial, {HEADER: json.dumps(self.facts)})
            os.replace(partial, path)
        except Exception as error:
            partial.unlink(missing_ok=True)
            if is_full(error):
                raise DiskFull(f"the disk of {path.parent} is full: make room and give the command again") from error
            raise

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Raises DataError when the file is missing or not one of ours."""
        try:
            with safe_open(path, "pt") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
                return cls(**columns, facts=json.loads(file.metadata()[HEADER]))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} does not hold examples for stop predictors") from error


#: One row: signals, depth, accepted, and the hidden states of target and drafter.
Example = tuple[Tensor, int, bool, Tensor | None, Tensor | None]


class Recorder(StoppingPolicy):
    """Drafts `k` tokens and notes each, with the verdict on it."""

    reads_q = True

    def __init__(self, *, k: int, hidden: bool) -> None:
        self.limit, self.reads_hidden = k, hidden
        self.examples: list[Example] = []
        self._round: list[tuple[Tensor, int, Tensor | None]] = []
        self._verified: Tensor | None = None

    def begin_round(self, hidden: Float[Tensor, " width"]) -> None:
        self._verified = hidden.bfloat16().cpu()

    def more(self, depth: int) -> bool:
        if depth == 0:
            self._round.clear()
        return super().more(depth)

    def keep(self, q: Tensor | None, depth: int, hidden: Tensor | None = None) -> bool:
        self._round.append((signals(q), depth, None if hidden is None else hidden.bfloat16().cpu()))
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        if self.reads_hidden and self._verified is None:
            return  # a prompt of one token: the target has shown nothing yet
        for shown, depth, hidden in self._round[: min(accepted + 1, drafted)]:
            self.examples.append((shown, depth, depth < accepted, self._verified, hidden))


def collect(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    k: int = 10,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = (0.0,),
    batch: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, examples: None,
) -> Examples:
    """Continue prompts with the drafter of `llm`, `k` tokens a round, and note what was drafted.

    Args:
        temperatures: the prompts take turns in them.
        progress: told of prompts done and examples made.

    Raises:
        DataError: nothing was drafted.
    """
    require(k >= 1, f"k must be >= 1, not {k}")
    target, drafter = llm.target, llm.drafter
    hidden = drafter.hidden_width is not None and target.has_blocks
    recording = LLM(target, drafter, Spec("record", Recorder, {"k": k, "hidden": hidden}), llm.verifier)
    requests = [
        recording.requests(
            [ids], max_new_tokens=max_new_tokens, temperature=temperatures[index % len(temperatures)], seed=seed + index
        )[0]
        for index, ids in enumerate(prompts)
    ]
    done = examples = 0
    for request in recording.engine.run(requests, batch):
        if request.finish_reason:
            done, examples = done + 1, examples + len(_noted(request))
            progress(done, examples)
    rows = [(*example, index) for index, request in enumerate(requests) for example in _noted(request)]
    if not rows:
        raise DataError(f"{drafter.source} drafted nothing for these prompts: there is nothing to learn from")
    shown, depth, accepted, verified, of_draft, prompt = zip(*rows, strict=True)
    return Examples(
        torch.stack(shown),
        torch.tensor(depth),
        torch.tensor(accepted),
        torch.tensor(prompt),
        torch.stack(verified) if hidden else None,
        torch.stack(of_draft) if hidden else None,
        {
            "target": model_key(target),
            "drafter": drafter.source,
            "k": k,
            "max_new_tokens": max_new_tokens,
            "temperatures": list(temperatures),
            "prompts": len(prompts),
            "seed": seed,
        },
    )


def _noted(request: Request) -> list[Example]:
    return cast(Recorder, request.policy).examples
