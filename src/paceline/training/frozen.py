"""The part of a target that does not learn: its first layers, cut out of it, and what comes out of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from paceline.errors import DataError, DiskFull
from paceline.targets.families import FAMILIES
from paceline.targets.span import Span
from paceline.targets.store import is_full
from paceline.targets.target import Target
from paceline.training.dataset import Batch, Dataset

#: Hidden states that enter layer N, of a batch's tokens.
Frozen = Callable[[Batch], Float[Tensor, "batch tokens hidden"]]

LARGEST = torch.finfo(torch.float16).max
BATCH = 2048  # tokens a pass


def cut(model: PreTrainedModel, first: int, last: int = 0) -> PreTrainedModel:
    """The model with its first and last layers only, in place. Of the others, weights that were mapped from the
    checkpoint have never been read."""
    family = FAMILIES[model.config.model_type]
    decoder, count = getattr(model, family.decoder), model.config.num_hidden_layers
    layers = [decoder.layers[i] for i in sorted({*range(first), *range(max(0, count - last), count)})]
    for index, layer in enumerate(layers):
        getattr(layer, family.attention).layer_idx = index
    decoder.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(layers)]  # all alike: other models are refused
    return model


class FrozenLayers:
    """Hidden states that enter layer N, computed when they are asked for.

    Args:
        target: the model, or one cut down to its first layers, on any tier.
        start: N.
    """

    def __init__(self, target: Target, start: int) -> None:
        self.target, self.start = target, start

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Float[Tensor, "batch tokens hidden"]:
        ids = batch.ids.to(self.target.device)
        span, cache = Span(ids, np.zeros(len(ids), dtype=np.int64)), self.target.new_cache(*ids.shape)
        return self.target.layers(self.target.embed(span), span, cache, 0, self.start)


class StoredLayers:
    """The same, computed once for all samples and kept in a file that later epochs and runs map into memory: float16,
    `hidden` numbers a token.

    Args:
        path: of the file; made now if it is not there.
        told: how many tokens are done, after every pass.

    Raises:
        DiskFull: the file does not fit the disk.
        DataError: the file cannot be written there, or is damaged.
    """

    def __init__(self, path: Path, layers: FrozenLayers, data: Dataset, told: Callable[[int], None]) -> None:
        shape = (data.tokens, layers.target.config.hidden_size)
        try:
            with FileLock(path.with_name(f".{path.name}.lock")):
                if not path.exists():
                    _compute(path, layers, data, told, shape)
            self.values = np.memmap(path, np.float16, "r", shape=shape)
        except ValueError as error:
            raise DataError(f"{path} is damaged: delete it, and it is made again") from error
        except OSError as error:
            if is_full(error):
                raise DiskFull(f"the disk is full: {path} needs {2 * shape[0] * shape[1] / 1e9:.1f} GB") from error
            raise DataError(f"cannot write {path}: {error.strerror}") from error

    def __call__(self, batch: Batch) -> Float[Tensor, "batch tokens hidden"]:
        rows = [torch.from_numpy(self.values[row.start : row.stop].astype(np.float32)) for row in batch.rows]
        return pad_sequence(rows, batch_first=True).to(batch.ids.device)


def store_path(data: Dataset, fingerprint: Tensor, start: int) -> Path:
    """Where the hidden states of this data and model are kept: beside the data."""
    key = hashlib.sha256(data.digest.encode() + fingerprint.numpy().tobytes()).hexdigest()
    return data.folder / f"hidden-{start}-{key[:12]}.f16"


def _compute(
    path: Path, layers: FrozenLayers, data: Dataset, told: Callable[[int], None], shape: tuple[int, int]
) -> None:
    partial, done = path.with_name(f".{path.name}.partial"), 0
    try:
        with partial.open("wb") as file:
            for samples in data.batches(range(len(data)), BATCH, seed=None):
                batch = data.batch(samples)
                # An outlier beyond float16's range stays the outlier it is: every layer begins with a norm.
                for row, hidden in zip(batch.rows, layers(batch).clamp(-LARGEST, LARGEST), strict=True):
                    file.seek(2 * shape[1] * row.start)
                    file.write(hidden[: len(row)].half().cpu().numpy().tobytes())
                told(done := done + sum(map(len, batch.rows)))
            file.truncate(2 * shape[0] * shape[1])
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
