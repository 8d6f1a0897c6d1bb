"""A frozen target's hidden states over the training text, in files: computed once, shared by heads, seeds and runs."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import DataError, DiskFull, require
from paceline.files import whole
from paceline.targets.identity import is_same, model_key
from paceline.training.task import STORE_LIMIT

if TYPE_CHECKING:
    from paceline.training.data.dataset import Batch, Dataset
    from paceline.training.heads.frozen_layers import FrozenLayers

LARGEST = torch.finfo(torch.float16).max
PASS = 2048  # tokens at a time
ABOUT = "about.safetensors"


class FeatureStore:
    """`FrozenLayers` in files, float16, mapped into memory: `2 * width` bytes a token.

    There is one file for each shard of the data, whole or absent: computing goes on where it was stopped, several
    processes share it, and data that has grown has only its new shards computed. Its name has the hash of the shard's
    contents, so that of a shard with other contents the states are computed anew.

    Args:
        layers: what to keep.
        fingerprint: of the model (see `probe`), which the files belong to.
        limit: most that may be stored, in GB.
        progress: told how many tokens are done, of how many.

    Raises:
        OptionError: the data needs more than `limit`.
        DiskFull: it does not fit the disk.
        DataError: the files belong to another model, are damaged, or cannot be written.
    """

    def __init__(
        self,
        layers: FrozenLayers,
        data: Dataset,
        fingerprint: Float[Tensor, "tokens hidden"],
        limit: float = STORE_LIMIT,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.layers, self.data = layers, data
        self.width = layers.width
        kind = str(layers.target.compute_dtype).removeprefix("torch.")
        name = f"{model_key(layers.target)}-{layers.name}-{data.max_length}" + f"-{kind}" * (kind != "float32")
        self.paths = [
            path.parent / "features" / name / f"{path.stem}-{digest[:16]}.f16"
            for path, digest in zip(data.paths, data.hashes, strict=True)
        ]
        gigabytes = self._bytes(range(len(self.paths))) / 1e9
        require(
            gigabytes <= limit,
            f"the features of this data take {gigabytes:.1f} GB, more than the limit of {limit:g} GB: raise "
            "--store-limit, or have them computed anew in every epoch with --no-store",
        )
        try:
            for folder in dict.fromkeys(path.parent for path in self.paths):
                _belongs(folder, fingerprint)
            self._fill(progress)
        except OSError as error:
            raise DataError(f"cannot write {error.filename or self.paths[0].parent}: {error.strerror}") from error
        self.parts = [self._mapped(path, len(shard.ids)) for path, shard in zip(self.paths, data.shards, strict=True)]

    def __call__(self, batch: Batch) -> Float[Tensor, "batch tokens width"]:
        rows = []
        for row in batch.rows:
            number = bisect_right(self.data.bases, row.start) - 1
            at = row.start - self.data.bases[number]
            rows.append(torch.from_numpy(self.parts[number][at : at + len(row)].astype(np.float32)))
        return pad_sequence(rows, batch_first=True).to(batch.ids.device)

    def _mapped(self, path: Path, tokens: int) -> np.memmap:
        if path.stat().st_size != 2 * self.width * tokens:
            raise DataError(f"{path} is damaged: delete it, and it is made again")
        return np.memmap(path, np.float16, "r", shape=(tokens, self.width))

    def _fill(self, progress: Callable[[int, int], None]) -> None:
        samples: dict[int, list[int]] = {number: [] for number in range(len(self.paths))}
        for index, (number, _) in enumerate(self.data.where):
            samples[number].append(index)
        sizes = [int(self.data.lengths[some].sum()) if some else 0 for some in samples.values()]
        there = {number for number, path in enumerate(self.paths) if path.exists()}
        missing = [number for number in samples if number not in there]
        folder, need = self.paths[0].parent, self._bytes(missing)
        if need > shutil.disk_usage(folder).free:
            raise DiskFull(f"the disk of {folder} is too full: the features of this data need {need / 1e9:.1f} GB")
        done, of = sum(sizes[number] for number in there), sum(sizes)
        for wait in (0, -1):  # first what no other process is at, then what others have not finished
            for number in missing:
                try:
                    with _locked(self.paths[number], wait):
                        if not self.paths[number].exists():
                            for count in self._compute(number, samples[number]):
                                progress(done := done + count, of)
                except Timeout:
                    continue

    def _compute(self, number: int, samples: list[int]) -> Iterator[int]:
        """Write a shard's file; gives the tokens of every pass."""
        with whole(self.paths[number]) as partial, partial.open("wb") as file:
            for some in self.data.batches(samples, PASS, seed=None) if samples else ():
                batch = self.data.batch(some)
                # An outlier beyond float16's range stays the outlier it is: a norm follows.
                for row, hidden in zip(batch.rows, self.layers(batch).clamp(-LARGEST, LARGEST), strict=True):
                    file.seek(2 * self.width * (row.start - self.data.bases[number]))
                    file.write(hidden[: len(row)].half().cpu().numpy().tobytes())
                yield sum(map(len, batch.rows))
            file.truncate(self._bytes([number]))
        folder, name = self.paths[number].parent, self.data.paths[number].stem
        for old in {folder / f"{name}.f16", *folder.glob(f"{name}-*.f16")} - {self.paths[number]}:
            old.unlink(missing_ok=True)  # of other contents, or from before its name told of which

    def _bytes(self, numbers: range | list[int]) -> int:
        return sum(2 * self.width * len(self.data.shards[number].ids) for number in numbers)


def _locked(path: Path, wait: float = -1) -> FileLock:
    return FileLock(path.with_name(f".{path.name}.lock"), timeout=wait)


def _belongs(folder: Path, fingerprint: Tensor) -> None:
    """Say which model the files of a folder are of, or check that they are of the same."""
    path = folder / ABOUT
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if not path.exists():
            with whole(path) as partial:
                save_file({"fingerprint": fingerprint.contiguous()}, partial)
            return
    try:
        with safe_open(path, "pt") as file:
            same = is_same(fingerprint, file.get_tensor("fingerprint"))
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: delete {folder}, and it is made again") from error
    if not same:
        raise DataError(f"{folder} is of another revision of the model: delete it")
