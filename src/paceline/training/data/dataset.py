"""Training data as batches: which samples go together, and what is to be predicted where."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.errors import DataError
from paceline.training.data.samples import GENERATED, MANIFEST, PROMPT, SHA256, UNKNOWN, Manifest, Shard

IGNORE = -100  # a label that no loss looks at, as in torch
WINDOW = 512  # samples among which those of like length are put together


class Batch(NamedTuple):
    """Texts side by side, padded at their ends. Position i's label is token i + 1."""

    ids: Int[Tensor, "batch tokens"]
    labels: Int[Tensor, "batch tokens"]  # IGNORE where the next token is none to learn
    top_ids: Int[Tensor, "batch tokens k"]  # what the target found likeliest as next token; UNKNOWN where not asked
    top_logp: Float[Tensor, "batch tokens k"]
    rows: list[range]  # where the texts lie in the dataset, by token
    step: int = 0  # of the training: what is drawn at random for a batch depends on it

    def to(self, device: torch.device) -> Batch:
        ids, labels, top_ids, top_logp = (tensor.to(device) for tensor in self[:4])
        return Batch(ids, labels, top_ids, top_logp, self.rows, self.step)


class Dataset:
    """The samples of folders that `paceline train data` wrote. Shards stay on the disk, mapped into memory.

    Args:
        folders: one or more.
        max_length: longer samples are cut there.

    Raises:
        DataError: there is no data, it is damaged, or made with another tokenizer than `tokenizer`, a fingerprint.
    """

    def __init__(self, *folders: Path, max_length: int = 1024, tokenizer: str | None = None) -> None:
        self.folders, self.max_length = folders, max_length
        self.manifests = [Manifest(folder).read() for folder in folders]
        for folder, manifest in zip(folders, self.manifests, strict=True):
            made = manifest["made"]
            if "tokenizer" not in made:
                raise DataError(f"{folder} is not training data: make that with 'paceline train data'")
            if tokenizer is not None and made["tokenizer"] != tokenizer:
                raise DataError(f"{folder} holds text of {made.get('model')}, whose tokenizer is not this model's")
            if made.get("top") != self.manifests[0]["made"].get("top"):
                raise DataError(f"{folder} keeps another number of likeliest tokens than {folders[0]}: see --top")
        self.paths = [
            folder / name
            for folder, manifest in zip(folders, self.manifests, strict=True)
            for name in sorted(manifest["shards"])
        ]
        self.shards = [Shard.load(path) for path in self.paths]
        self.hashes = [shard.digest for shard in self.shards]
        told = [entry.get(SHA256) for manifest in self.manifests for _, entry in sorted(manifest["shards"].items())]
        for path, known, found in zip(self.paths, told, self.hashes, strict=True):
            if known not in (None, found):  # None: from before hashes were kept
                raise DataError(
                    f"{path} is not the shard that {MANIFEST} tells of: give the command again that made the data"
                )
        self.tokens = sum(len(shard.ids) for shard in self.shards)
        self.where: list[tuple[int, int]] = []  # of each sample: its shard, its first token there
        starts, lengths, learnt, generated = [], [], [], []
        self.bases: list[int] = []  # of each shard: its first token in the dataset
        base = 0
        for index, shard in enumerate(self.shards):
            self.bases.append(base)
            for start, stop in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
                stop = min(stop, start + max_length)
                mask = shard.mask[start + 1 : stop]
                if count := int((mask != PROMPT).sum()):
                    self.where.append((index, start))
                    starts.append(base + start)
                    lengths.append(stop - start)
                    learnt.append(count)
                    generated.append(bool((mask == GENERATED).any()))
            base += len(shard.ids)
        if not self.where:
            named = ", ".join(map(str, folders))
            raise DataError(f"{named} has no samples to learn from in the first {max_length} tokens (--max-length)")
        self.starts, self.lengths, self.learnt = np.array(starts), np.array(lengths), np.array(learnt)
        self.generated = np.array(generated)

    def __len__(self) -> int:
        return len(self.where)

    def split(self, held_back: int) -> tuple[list[int], list[int]]:
        """Samples to train on, and `held_back` (at most a tenth of all) to measure on: generated ones if there are any.
        These are the same for every training on this data. What begins with one of their prompts is in neither part:
        other answers to it, and text that somebody else wrote.

        Raises DataError where there are not enough for both.
        """
        order = np.random.default_rng(0).permutation(len(self)).tolist()
        count = min(held_back, max(1, len(self) // 10))
        held = ([index for index in order if self.generated[index]] or order)[:count]
        measured = _shortest(prompt for index in held if (prompt := self.prompt(index)))
        training = sorted(index for index in set(order).difference(held) if not self._begins(index, measured))
        if not training:
            raise DataError(
                f"{self.folders[0]} has a single sample, or answers to one prompt: none to train on beside the one "
                "to measure on"
            )
        return training, held

    def prompt(self, index: int) -> bytes | None:
        """The ids of a sample's prompt; None: the model wrote nothing in it."""
        if not self.generated[index]:
            return None
        number, start = self.where[index]
        mask = self.shards[number].mask[start + 1 : start + int(self.lengths[index])]
        return self._ids(index, int((mask != PROMPT).int().argmax()) + 1)

    def _ids(self, index: int, length: int) -> bytes:
        number, start = self.where[index]
        return self.shards[number].ids[start : start + length].numpy().tobytes()

    def _begins(self, index: int, prompts: list[bytes]) -> bool:
        """Whether a sample begins with one of these, of which none begins with another; sorted."""
        ids = self._ids(index, int(self.lengths[index]))
        before = bisect_right(prompts, ids)  # what it begins with comes right before it
        return before > 0 and ids.startswith(prompts[before - 1])

    def batches(self, samples: Sequence[int], tokens: int, seed: tuple[int, ...] | None) -> list[list[int]]:
        """Samples of like length in batches of at most `tokens` tokens, padding included (a longer one alone).

        Args:
            seed: of the order, in which every sample comes once; None: by length.
        """
        order = np.array(samples)
        shuffle = np.random.default_rng(seed)
        if seed is not None:
            shuffle.shuffle(order)
        found: list[list[int]] = []
        width = WINDOW if seed is not None else len(order)
        for at in range(0, len(order), width):
            window = order[at : at + width]
            found += _filled(window[np.argsort(self.lengths[window], kind="stable")].tolist(), self.lengths, tokens)
        if seed is not None:
            shuffle.shuffle(found)
        return found

    def batch(self, samples: Sequence[int], step: int = 0) -> Batch:
        all_ids, labels, top_ids, top_logp = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for index in samples:
            number, start = self.where[index]
            shard, stop = self.shards[number], start + int(self.lengths[index])
            after = slice(start + 1, stop)  # the last token predicts nothing that we know
            ids = shard.ids[start:stop].long()
            all_ids.append(ids)
            labels.append(torch.where(shard.mask[after] == PROMPT, IGNORE, ids[1:]))
            top_ids.append(shard.top_ids[after].long())
            top_logp.append(shard.top_logp[after].float())
        width = int(self.lengths[list(samples)].max())
        return Batch(
            _padded(all_ids, width, 0),
            _padded(labels, width, IGNORE),
            _padded(top_ids, width, UNKNOWN),
            _padded(top_logp, width, -torch.inf),
            [range(self.starts[index], self.starts[index] + self.lengths[index]) for index in samples],
            step,
        )

    def frequencies(self, vocab: int) -> Float[Tensor, " vocab"]:
        """How often each token is to be expected: by the target's own probabilities where they are known, which tell
        more of rare tokens than the text does.

        Raises DataError where tokens are not below `vocab`.
        """
        counts = torch.zeros(vocab, dtype=torch.double)
        for path, shard in zip(self.paths, self.shards, strict=True):
            if any(column.numel() and int(column.max()) >= vocab for column in (shard.ids, shard.top_ids)):
                raise DataError(f"{path} is damaged: it has tokens that the model does not know")
            known = (shard.top_ids != UNKNOWN).any(1)
            counts += torch.bincount(shard.ids[(shard.mask != PROMPT) & ~known].long(), minlength=vocab)
            p = shard.top_logp[known].double().softmax(1)
            counts += torch.bincount(shard.top_ids[known].long().flatten(), p.flatten(), minlength=vocab)
        return counts

    @property
    def digest(self) -> str:
        """Tells this data, cut to this length, from other data."""
        return hashlib.sha256(json.dumps([self.hashes, self.max_length]).encode()).hexdigest()[:16]


def _shortest(prompts: Iterable[bytes]) -> list[bytes]:
    """Sorted, without those that begin with another."""
    found: list[bytes] = []
    for prompt in sorted(set(prompts)):
        if not (found and prompt.startswith(found[-1])):
            found.append(prompt)
    return found


def _filled(samples: list[int], lengths: Any, tokens: int) -> list[list[int]]:
    """Ascending samples cut into batches."""
    found: list[list[int]] = [[]]
    for index in samples:
        if found[-1] and (len(found[-1]) + 1) * lengths[index] > tokens:
            found.append([])
        found[-1].append(index)
    return found


def _padded(rows: Sequence[Tensor], width: int, value: float) -> Tensor:
    full = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
    for index, row in enumerate(rows):
        full[index, : len(row)] = row
    return full


def frequent_tokens(
    frequencies: Float[Tensor, " vocab"], count: int | None, always: tuple[int, ...]
) -> list[int] | None:
    """The `count` most frequent tokens, those of `always` among them; None: all."""
    if count is None or count >= len(frequencies):
        return None
    always = tuple(token for token in always if token < len(frequencies))  # configurations name others, too
    order = frequencies.argsort(descending=True, stable=True).tolist()
    return sorted([*always, *(token for token in order if token not in always)][:count])
