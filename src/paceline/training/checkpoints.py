"""Where training stood: weights and optimizer, one file a checkpoint, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from paceline.errors import CheckpointError, OptionError, require
from paceline.files import whole

LOCK = ".training.lock"
WEIGHT, STATE = "weight.", "state."  # prefixes of the tensors' names


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other trainings out of the folder `out`, which is made. Where nothing comes of it, it is gone again.

    Raises:
        OptionError: another training runs there, or it is a file.
    """
    require(out.is_dir() or not out.exists(), f"{out} is a file: name a folder")
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OptionError(f"another training runs in {out}: wait for its end, or choose another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):  # the folder was moved, say
            if [path.name for path in out.iterdir()] == [LOCK]:
                (out / LOCK).unlink()
                if new:
                    out.rmdir()
        lock.release()


class Checkpoints:
    """The checkpoints of one training.

    Args:
        settings: all that the result depends on; a training is resumed with the same only.
        keep: latest files that stay.
    """

    def __init__(self, out: Path, settings: dict[str, Any], keep: int) -> None:
        self.out, self.keep = out, keep
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))

    def all(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.out.glob("checkpoint-*.safetensors"))

    def latest(self) -> Path | None:
        return found[-1] if (found := self.all()) else None

    def stored_settings(self) -> dict[str, Any]:
        """Of the latest; nothing where there is none, or where it cannot be read."""
        with suppress(OSError, SafetensorError, KeyError, ValueError, TypeError):
            if path := self.latest():
                with safe_open(path, "pt") as file:
                    found: dict[str, Any] = json.loads(file.metadata()["settings"])
                    return found
        return {}

    def check_new(self) -> None:
        """Raises OptionError where a training was begun."""
        if self.latest() is not None:
            raise OptionError(
                f"{self.out} holds a training: go on with --resume, delete it to begin anew, or choose another folder "
                f"with --out"
            )

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises DiskFull; the checkpoints before stay as they are."""
        tensors = {WEIGHT + name: weight for name, weight in module.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{STATE}{index}.{name}": value for name, value in state.items()}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with whole(self.out / f"checkpoint-{step:07}.safetensors", "go on with --resume") as path:
            save_file(tensors, path, {"step": str(step), "settings": json.dumps(self.settings)})
        for old in self.all()[: -self.keep]:
            old.unlink()

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Take up the latest checkpoint; returns its step, or 0 where there is none.

        Raises:
            OptionError: the training was begun with other settings.
            CheckpointError: the file is damaged.
        """
        path = self.latest()
        if path is None:
            return 0
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()
                self._check(json.loads(about["settings"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            module.load_state_dict({n.removeprefix(WEIGHT): t for n, t in tensors.items() if n.startswith(WEIGHT)})
            state: dict[int, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(STATE):
                    index, _, key = name.removeprefix(STATE).partition(".")
                    state.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            return int(about["step"])
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: delete it, and --resume takes the one before") from error

    def _check(self, settings: dict[str, Any]) -> None:
        mine = self.settings
        keys = {**mine, **settings}.keys() - {"keep"}
        # An option that the version before did not have yet is what is empty now.
        differing = sorted(key for key in keys if (mine.get(key) or None) != (settings.get(key) or None))
        if differing:
            names = ", ".join(key.replace("_", "-") for key in differing)
            raise OptionError(f"the training in {self.out} was begun with another {names}")
