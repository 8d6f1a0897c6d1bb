"""Trained heads in the layouts of other programs: a folder with a `config.json` and one file of tensors."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.files import read_json, whole_folder

#: `original`: what the program reads that the method came with. Both are read, either can be written.
Layout = Literal["vllm", "original"]
CONFIG = "config.json"
SHOWN = 4  # names in a message


def read_config(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError when it cannot be read."""
    path = folder / CONFIG
    try:
        config = read_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a configuration")
    return config


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of the first of these files that is there. Of a pickle nothing but tensors is read.

    Raises:
        CheckpointError: there is none, it is damaged, or something else is in it.
    """
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"there are no weights in {folder}: {' or '.join(names)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or a pickle of more than tensors, which could run code and is not read: convert it "
            "to safetensors where you trust it"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()
    ):
        raise CheckpointError(f"{path} does not hold tensors by name")
    return tensors


def require_shapes(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]], where: str, ids: Collection[str] = ()
) -> None:
    """Raises CheckpointError unless the tensors have these names and shapes, and hold token ids under the names in
    `ids`, floats under the others.
    """
    faults = []
    if missing := wanted.keys() - tensors.keys():
        faults.append(f"missing: {_listed(missing)}")
    if extra := tensors.keys() - wanted.keys():
        faults.append(f"unknown: {_listed(extra)}")
    shapes = {name: (list(tensors[name].shape), list(wanted[name])) for name in wanted.keys() & tensors.keys()}
    if misshaped := {f"{name} {is_} instead of {should}" for name, (is_, should) in shapes.items() if is_ != should}:
        faults.append(f"misshaped: {_listed(misshaped)}")
    if other := {f"{name} of {t.dtype}" for name, t in tensors.items() if t.is_floating_point() == (name in ids)}:
        faults.append(f"of another type: {_listed(other)}")
    if faults:
        raise CheckpointError(f"{where} does not hold the tensors of its layout; {'; '.join(faults)}")


def write_layout(out: Path, config: Mapping[str, Any], weights: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the new folder `out`, which appears complete or not at all.

    Args:
        weights: name of the file of tensors, whose suffix decides between safetensors and torch's own format.

    Raises:
        OptionError: there is something in `out`.
        DiskFull: there is no room.
    """
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if weights.endswith(".safetensors"):
            save_file(plain, folder / weights, {"format": "pt"})
            shutil.copymode(folder / CONFIG, folder / weights)  # safetensors keeps its files from all other users
        else:
            torch.save(plain, folder / weights)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(islice(names, SHOWN)) + more
