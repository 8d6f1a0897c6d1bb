"""Training samples on disk: shards of token ids with a loss mask, and a manifest that tells where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from filelock import FileLock
from jaxtyping import Float, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import DataError
from paceline.files import read_json, whole

if TYPE_CHECKING:
    from paceline.targets.target import Target

MANIFEST = "manifest.json"
FORMAT = 1
SHA256 = "sha256"  # of a shard, beside its counts in the manifest
PROMPT, GENERATED, OPEN = 0, 1, 2  # values of the mask: not learnt; learnt, as the model wrote it or as open text
UNKNOWN = -1  # in `top_ids`: nobody asked the model at this position

#: Of a shard, with their dtypes.
COLUMNS = {
    "ids": torch.int32,
    "mask": torch.uint8,
    "offsets": torch.int64,
    "top_ids": torch.int32,
    "top_logp": torch.float16,
}


@dataclass
class Sample:
    """One text.

    Attributes:
        mask: PROMPT, GENERATED or OPEN for each token; a drafter learns to predict those that are not PROMPT.
        top: for the tokens that the model wrote, by position: its most likely tokens there, best first, and the natural
            logarithms of their probabilities (at temperature 1, whatever the text was sampled at).
    """

    ids: list[int]
    mask: list[int]
    top: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)


class Shard(NamedTuple):
    """Samples end to end: sample i has the tokens `offsets[i] .. offsets[i + 1] - 1`."""

    ids: Int[Tensor, " tokens"]
    mask: UInt8[Tensor, " tokens"]
    offsets: Int[Tensor, " samples+1"]
    top_ids: Int[Tensor, "tokens k"]  # UNKNOWN in every row that is not `Sample.top`
    top_logp: Float[Tensor, "tokens k"]

    @classmethod
    def of(cls, samples: Sequence[Sample], top: int) -> Shard:
        """The samples end to end.

        Args:
            top: k, the most entries of a `Sample.top`.
        """
        offsets = [0]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample.ids))
        top_ids = torch.full((offsets[-1], top), UNKNOWN, dtype=torch.int32)
        top_logp = torch.full((offsets[-1], top), -torch.inf, dtype=torch.float16)
        known = [(at + i, best) for at, s in zip(offsets, samples, strict=False) for i, best in s.top.items()]
        if known:
            rows = torch.tensor([row for row, _ in known])
            top_ids[rows] = torch.tensor([ids for _, (ids, _) in known], dtype=torch.int32)
            top_logp[rows] = torch.tensor([logp for _, (_, logp) in known]).half()
        return cls(
            torch.tensor([token for sample in samples for token in sample.ids], dtype=torch.int32),
            torch.tensor([flag for sample in samples for flag in sample.mask], dtype=torch.uint8),
            torch.tensor(offsets, dtype=torch.int64),
            top_ids,
            top_logp,
        )

    @classmethod
    def load(cls, path: Path) -> Shard:
        """Raises DataError when the file is missing or damaged."""
        if not path.is_file():
            raise DataError(f"{path} is missing: give the command again that made the data")
        try:
            columns = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is not a shard of training data: {' '.join(str(error).split())}") from error
        if {name: column.dtype for name, column in columns.items()} != COLUMNS or not (shard := cls(**columns))._fits():
            raise DataError(
                f"{path} is not a shard of training data: it holds something else, or parts that do not fit"
            )
        return shard

    def _fits(self) -> bool:
        """Whether the columns go together, and every sample lies within them."""
        count, offsets = len(self.ids), self.offsets
        alike = {len(column) for column in (self.mask, self.top_ids, self.top_logp)} <= {count}
        ordered = len(offsets) > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == count
        flat = [column.dim() for column in self] == [1, 1, 1, 2, 2]
        return flat and alike and ordered and bool((offsets.diff() >= 0).all()) and bool((self.ids >= 0).all())

    @property
    def digest(self) -> str:
        """Hash of the contents; not of the file, whose header need not be the same twice."""
        found = hashlib.sha256()
        for name, column in self._asdict().items():
            found.update(f"{name} {list(column.shape)} ".encode())
            found.update(column.flatten().numpy())
        return found.hexdigest()

    def samples(self) -> list[tuple[list[int], list[int]]]:
        """Ids and mask of each sample."""
        sizes = self.offsets.diff().tolist()
        pairs = zip(self.ids.split(sizes), self.mask.split(sizes), strict=True)
        return [(ids.tolist(), mask.tolist()) for ids, mask in pairs]


def shard_name(group: int) -> str:
    return f"samples-{group:05}.safetensors"


def write_shard(folder: Path, group: int, samples: Sequence[Sample], top: int, counts: dict[str, int]) -> None:
    """Write one shard, whole or not at all. Raises DiskFull."""
    with whole(folder / shard_name(group), "give the same command again") as path:
        save_file(Shard.of(samples, top)._asdict(), path, {name: str(count) for name, count in counts.items()})


def shard_counts(path: Path) -> dict[str, int] | None:
    """The counts a shard was written with; None when it is absent or damaged, so that it must be made (again)."""
    try:
        Shard.load(path)
        with safe_open(path, "pt") as file:
            return {name: int(count) for name, count in sorted(file.metadata().items())}  # it has no order of its own
    except (DataError, SafetensorError, ValueError, AttributeError):
        return None


def computed_by(target: Target) -> dict[str, Any]:
    """What samples depend on besides the model, for `Manifest.open`."""
    dtype = str(target.compute_dtype).removeprefix("torch.")
    return {"dtype": dtype, "exactness": "exact" if target.exact else "inexact"}


class Manifest:
    """`manifest.json`: what the samples of a folder are, and how many. Several processes may keep it together."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        self._lock = FileLock(folder / f".{MANIFEST}.lock")

    def open(self, made: dict[str, Any], **facts: Any) -> None:
        """Start it, or check that it tells the same: `made` is all that the samples depend on.

        Raises:
            DataError: the folder holds samples that were made otherwise, or something else.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = json.loads(json.dumps(made))
        with self._lock:
            if not self.path.exists():
                self._write({"format": FORMAT, "made": made, **facts, "shards": {}, "totals": {}})
                return
            there = self.read()["made"]
            for name in ("prompts", "text"):  # before their order counted, they were kept by name
                if isinstance(there.get(name), dict):
                    there[name] = [list(pair) for pair in there[name].items()]
            there = {key: made.get(key) for key in ("dtype", "exactness")} | there  # which were not kept before
            if differing := [key for key in {**made, **there} if made.get(key) != there.get(key)]:
                raise DataError(
                    f"{self.path.parent} holds what was made with another {', '.join(differing)}: "
                    "delete that folder, or choose another"
                )

    @contextmanager
    def filled(self, alone: bool = True) -> Iterator[None]:
        """Around what makes shards. Where that fails before there is one it is gone again, as it would refuse the same
        with what was wrong put right; unless not `alone`: other processes may be at it still.
        """
        try:
            yield
        except BaseException:
            if alone and not any(self.path.parent.glob("*.safetensors")):
                self.remove()
            raise

    def add(self, name: str, counts: dict[str, int], sha256: str | None = None) -> None:
        """Enter a shard, with the hash of its contents."""
        with self._lock:
            facts = self.read()
            entry = counts if sha256 is None else {**counts, SHA256: sha256}
            facts["shards"] = dict(sorted({**facts["shards"], name: entry}.items()))
            facts["totals"] = {kind: sum(shard[kind] for shard in facts["shards"].values()) for kind in counts}
            self._write(facts)

    def remove(self) -> None:
        """Of a folder in which nothing was made."""
        with suppress(OSError):  # as where something else lies in the folder
            self.path.unlink(missing_ok=True)
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self.path.parent.rmdir()

    def read(self) -> dict[str, Any]:
        """Raises DataError when there is none, or not one of ours."""
        try:
            facts: dict[str, Any] = read_json(self.path.read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise DataError(f"{self.path} is of another version of paceline")
            parts = [facts["made"], facts["shards"], facts["totals"], *facts["shards"].values()]
            if not all(isinstance(part, dict) for part in parts):
                raise TypeError("a part is no table")
        except OSError as error:
            folder = self.path.parent
            why = f"it has no {MANIFEST}, which 'paceline train data' writes" if folder.is_dir() else error.strerror
            raise DataError(f"there is no training data in {folder}: {why}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path} is not the manifest of training data") from error
        return facts

    def _write(self, facts: dict[str, Any]) -> None:
        with whole(self.path, "give the same command again") as path:
            path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
