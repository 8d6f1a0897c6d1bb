"""Weights in float32 that have fewer bits to tell, stored in as many.

Checkpoints in 16 bits and GGUF files become float32 where all is computed in float32. What they were is still there
to be seen: the lower half of each number is zero, or each 32 numbers of a row are multiples of one. A pass over a few
tokens takes as long as reading its weights, so a copy of half the size, or of a fifth, makes it as much faster. Only
what gives every weight back to the last bit is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.targets.narrow_tile import BFLOAT16, BLOCKS4, BLOCKS8, FLOAT16, FLOAT32, LANES, READS_HALVES, Form

_AT_A_TIME = 1 << 22  # weights


class Compact(NamedTuple):
    form: Form
    codes: Tensor  # [panels, rows of codes, panel]: words, or of float32 oneDNN's own blocks
    scales: Float[Tensor, "panels blocks scales panel"] | None = None

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)


def as_they_are(blocks: Float[Tensor, "panels inputs panel"]) -> Compact:
    return Compact(FLOAT32, blocks)


def compact(blocks: Float[Tensor, "panels inputs panel"], inputs: int, chunk: int) -> Compact:
    """The smallest form that holds these weights exactly.

    Args:
        inputs: of them; what comes after them is padding.
        chunk: inputs that are summed in one chain, whole blocks of a form.
    """
    for form, encode in _FORMS:
        if inputs % form.block or chunk % form.block or encode(_in_panels(blocks[:1, :inputs])) is None:
            continue
        parts = []
        for some in _pieces(blocks[:, :inputs]):
            part = encode(_in_panels(some))
            if part is None:
                break
            parts.append(part)
        else:
            codes, scales = (torch.cat([part[i] for part in parts]) for i in range(2))
            return Compact(form, codes, scales if form.scales else None)
    return as_they_are(blocks)


def has_room(weights: int) -> bool:
    """Whether half of the memory that is free would hold copies of so many bytes of weights, in 16 bits."""
    return weights / 2 <= _free_memory() / 2


def _free_memory() -> float:
    """Bytes that can be had without anything being written to the disk; infinite where the system does not tell."""
    own = inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        own = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # of a container; "max" is no number: none
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        own = min(own, float(limit - used))
    return own


def _in_panels(blocks: Float[Tensor, "blocks inputs outputs"]) -> Float[Tensor, "panels inputs lanes"]:
    panels: Tensor = blocks.unflatten(2, (-1, LANES)).transpose(1, 2).flatten(0, 1)
    return panels


def _pieces(blocks: Tensor) -> Iterator[Tensor]:
    yield from blocks.split(max(1, _AT_A_TIME // blocks[0].numel()))


def _upper_halves(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    bits = blocks.contiguous().view(torch.int32)
    if (bits & 0xFFFF).any():
        return None
    return _words((bits >> 16).to(torch.int16), 2), blocks.new_empty(0)


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    halves = blocks.half()
    if not torch.equal(halves.float(), blocks):
        return None
    return halves.contiguous().view(torch.int32).view(len(blocks), -1, LANES), blocks.new_empty(0)


def _multiples(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of a factor with the precision of float16, by whole numbers up to 127: blocks of Q8_0."""
    grouped = _grouped(blocks)
    factors = (grouped.abs().amax(2, keepdim=True) / 127).half().float()
    codes = torch.where(factors > 0, grouped / factors, 0.0).round_().clamp_(-127, 127)
    if not torch.equal(codes * factors, grouped):
        return None
    return _words(codes.to(torch.int8).view(blocks.shape), 4), factors


def _digits(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    """An offset and multiples of a factor by 0 to 15. Whoever made the block chose them by its extremes: both of them
    (GGUF's Q4_1), or the one farther from zero (Q4_0).
    """
    grouped = _grouped(blocks)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    codes, factors = _by_factor(grouped, low, ((high - low) / 15).half().float())
    if not torch.equal(codes * factors + low, grouped):
        low = torch.where(high > -low, high, low)
        codes, factors = _by_factor(grouped, low, (low / -8).half().float())  # a half: products by digits are exact
        if not torch.equal(codes * factors + low, grouped):
            return None
    digits = codes.to(torch.uint8).view(len(blocks), -1, 2, LANES)
    return _words(digits[:, :, 0] | digits[:, :, 1] << 4, 4), torch.cat([factors, low], 2)


def _words(codes: Int[Tensor, "panels rows lanes"], count: int) -> Int[Tensor, "panels fewer lanes"]:
    """So many rows' codes in a word, the first row's in its lowest bits."""
    together: Tensor = codes.unflatten(1, (-1, count)).transpose(2, 3)
    return together.contiguous().view(torch.int32).squeeze(3)


def _by_factor(grouped: Tensor, offsets: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(factors != 0, (grouped - offsets) / factors, 0.0).round_().clamp_(0, 15), factors


def _grouped(blocks: Tensor) -> Float[Tensor, "panels blocks 32 panel"]:
    return blocks.reshape(len(blocks), -1, BLOCKS4.block, blocks.shape[2])


_FORMS = (
    (BLOCKS4, _digits),
    (BLOCKS8, _multiples),
    (BFLOAT16, _upper_halves),
    *([(FLOAT16, _halves)] if READS_HALVES else []),
)
