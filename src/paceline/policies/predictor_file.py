"""Trained predictors on disk: one safetensors file, whose header tells what it is and what it was trained for."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CheckpointError, CheckpointMismatch, OptionError
from paceline.files import whole
from paceline.policies.base import Setting
from paceline.policies.predictors import FORMS, Predictor

FORMAT = "1"
HEADER = "paceline"  # its key among the file's metadata, which safetensors keeps as strings

log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Origin:
    """What a predictor was trained for.

    Attributes:
        policy: name of the policy it serves.
        target, drafter: as in `Setting`.
        trained: how; free form.
    """

    policy: str
    target: str
    drafter: str
    trained: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Trained:
    """A predictor with its origin."""

    predictor: Predictor
    origin: Origin
    path: str

    def check(self, setting: Setting) -> None:
        """Raises CheckpointMismatch where its hidden states have another width; warns where only a name differs."""
        here = {"width": setting.width, "draft_width": setting.draft_width}
        fits = all(here[name] == size for name, size in self.predictor.shape.items() if name in here)
        if fits and (self.origin.target, self.origin.drafter) == (setting.target, setting.drafter):
            return
        message = (
            f"{self.path} was trained for {self.origin.target} with the drafter {self.origin.drafter}, "
            f"not for {setting.target} with {setting.drafter}"
        )
        if not fits:
            raise CheckpointMismatch(message)
        _warn(message + ": output stays right, but drafts may be longer or shorter than pays")


def save(path: Path, predictor: Predictor, origin: Origin) -> None:
    """Write a predictor, whole or not at all. Raises DiskFull."""
    header = {"format": FORMAT, "form": predictor.kind, "shape": predictor.shape, **asdict(origin)}
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in predictor.state_dict().items()}
    with whole(path) as partial:
        save_file(tensors, partial, {HEADER: json.dumps(header)})


def load(path: str | Path, policy: str) -> Trained:
    """A saved predictor of a policy; read once, however many requests use it.

    Raises:
        CheckpointError: there is none, it is damaged, or it serves another policy.
    """
    try:
        trained = _load(str(path), Path(path).stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"there is no stop predictor {path}: {error.strerror}") from error
    if trained.origin.policy != policy:
        raise CheckpointError(f"{path} is a predictor of the policy {trained.origin.policy}, not of {policy}")
    return trained


@lru_cache(maxsize=16)
def _load(path: str, _modified: int) -> Trained:
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()[HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        if header.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is of another version of paceline")
        predictor = FORMS[header.pop("form")](**header.pop("shape"))
        predictor.load_state_dict(tensors)
        return Trained(predictor.eval().requires_grad_(False), Origin(**header), path)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a stop predictor: {' '.join(str(error).split())}") from error


def find(setting: Setting, policy: str) -> Trained | None:
    """The predictor of a policy that was trained on this machine, or comes with the drafter."""
    paths = (folder / file_name(policy) for folder in setting.predictors)
    return next((load(path, policy) for path in paths if path.is_file()), None)


def file_name(policy: str) -> str:
    return f"{policy}.safetensors"


def need_hidden(setting: Setting, policy: str, *, of_target: bool) -> None:
    """Raises OptionError where there are no hidden states to look at."""
    if setting.draft_width is None:
        drafter = setting.drafter or "'none'"
        raise OptionError(f"{policy} looks at the drafter's hidden states, and {drafter} has none to show")
    if of_target and setting.width is None:
        raise OptionError(f"{policy} looks at the model's last hidden states, which {setting.target} does not show")


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    """Once, not for every request."""
    log.warning(message)
