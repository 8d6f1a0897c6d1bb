"""Has a drafter draft and a target judge, and notes what a stopping policy could have seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.api import LLM
from paceline.errors import DataError, require
from paceline.policies.base import StoppingPolicy
from paceline.policies.predictors import signals
from paceline.registry import Spec
from paceline.targets.identity import model_key
from paceline.targets.store import sha256
from paceline.training.data.samples import Manifest, computed_by
from paceline.training.stop_predictor.examples import Example, Examples

if TYPE_CHECKING:
    from paceline.decoding.request import Request
    from paceline.drafting.base import Drafter

GROUP = 32  # prompts a shard: the work that a kill may cost


class Recorder(StoppingPolicy):
    """Drafts `k` tokens and notes each, with the verdict on it.

    Args:
        width: of the drafter's hidden states; None: there are none to note.
    """

    reads_q = True

    def __init__(self, *, k: int, width: int | None) -> None:
        self.limit, self.reads_hidden, self.width = k, width is not None, width
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
        if self.width is not None and hidden is None:  # of a copy: predictors are shown zeros, too
            hidden = torch.zeros(self.width)
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
    folder: Path | None = None,
    anew: bool = False,
    method: str = "",
    progress: Callable[[int, int], None] = lambda done, examples: None,
) -> Examples:
    """Continue prompts with the drafter of `llm`, `k` tokens a round, and note what was drafted.

    Args:
        temperatures: the prompts take turns in them.
        folder: keeps the examples, shard by shard: a run that was stopped goes on there, and one that is complete is
            only read. None: nothing is kept.
        anew: what `folder` has that was made otherwise is thrown away.
        method: the drafter as the user wrote it, with its options; examples of another do not go into the same folder.
        progress: told of prompts done and examples made.

    Raises:
        DataError: nothing was drafted, or `folder` holds what was made otherwise (unless `anew`).
        DiskFull: what was written so far stays.
    """
    require(k >= 1, f"k must be >= 1, not {k}")
    target, drafter = llm.target, llm.drafter
    how = {"k": k, "max_new_tokens": max_new_tokens, "temperatures": list(temperatures), "seed": seed}
    facts = {"target": model_key(target), "drafter": drafter.source, "prompts": len(prompts), **how}
    manifest = Manifest(folder) if folder else None
    if folder and manifest:
        asked = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        made = {**facts, "drafter": method or drafter.source, "head": _head(drafter), "prompts": asked}
        made |= computed_by(target)
        try:
            manifest.open(made)
        except DataError:
            if not anew:
                raise
            for path in [*folder.glob("examples-*.safetensors"), manifest.path]:
                path.unlink()
            manifest.open(made)
    width = drafter.hidden_width if shows_hidden(llm) else None
    recording = LLM(target, drafter, Spec("record", Recorder, {"k": k, "width": width}), llm.verifier)
    parts: list[Examples] = []
    done = noted = 0

    def count(examples: int, prompts: int = 1) -> None:
        nonlocal done, noted
        done, noted = done + prompts, noted + examples
        progress(done, noted)

    with manifest.filled() if manifest else nullcontext():
        for first in range(0, len(prompts), GROUP):
            group = range(first, min(first + GROUP, len(prompts)))
            name = f"examples-{first // GROUP:05}.safetensors"
            part = _kept(folder / name) if folder else None
            if part:
                count(len(part), len(group))
            elif rows := _record(recording, {index: prompts[index] for index in group}, facts, batch, count):
                part = Examples.of(rows, facts)
                if folder and manifest:
                    part.save(folder / name)
                    manifest.add(name, {"prompts": len(group), "examples": len(part)})
            parts += [part] if part else []
        if not parts:
            raise DataError(f"{drafter.source} drafted nothing for these prompts: there is nothing to learn from")
    return Examples.joined(parts)


def shows_hidden(llm: LLM) -> bool:
    """Whether examples have the hidden states of target and drafter."""
    return llm.drafter.hidden_width is not None and llm.target.has_blocks


def _head(drafter: Drafter) -> str | None:
    """Which head it drafts with: `auto` may find another one next time."""
    if drafter.folder is None:
        return None
    for name in (f"{drafter.source}.json", "eagle3.json"):  # which name their weights
        if (path := drafter.folder / name).exists():
            return sha256(path)
    public = [path for kind in ("config.json", "*.safetensors", "*.bin") for path in sorted(drafter.folder.glob(kind))]
    return " ".join(map(sha256, public)) or str(drafter.folder)


def _record(
    recording: LLM, prompts: dict[int, list[int]], how: dict[str, Any], batch: int, count: Callable[[int], None]
) -> list[tuple[Example, int]]:
    """The examples of prompts by index. What a prompt gives depends on its index, not on what stands beside it."""
    temperatures, seed = how["temperatures"], how["seed"]
    requests = {
        index: recording.requests(
            [ids],
            max_new_tokens=how["max_new_tokens"],
            temperature=temperatures[index % len(temperatures)],
            seed=seed + index,
        )[0]
        for index, ids in prompts.items()
    }
    for request in recording.engine.run(list(requests.values()), batch):
        if request.finish_reason:
            count(len(_noted(request)))
    return [(example, index) for index, request in requests.items() for example in _noted(request)]


def _noted(request: Request) -> list[Example]:
    return cast("Recorder", request.policy).examples


def _kept(path: Path) -> Examples | None:
    """A shard that is there; none where it is absent, or damaged so that it must be made again."""
    try:
        return Examples.load(path)
    except DataError:
        return None
