"""Matrix products with a model's weights: plain, or prepacked by oneDNN."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from paceline.targets.narrow import NarrowProduct

_ROWS = 64  # widths the width-independence check goes up to, besides one of a prompt chunk
_CHUNK = 512
_FEW = 8
_SOME = 1_000_003  # random numbers; a prime, so that rows differ
_OUTPUTS = 1 << 22  # of one product of the check: memory that a large head would not leave otherwise
_ONE_BY_ONE = 4  # rows that are found sooner one after the other
_BLOCKS = (64, 48, 32, 24, 16, 8)  # rows a block of oneDNN's weight formats


def linear_module(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> nn.Linear:
    """A frozen module around these very tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class PlainLinear:
    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def bytes(self) -> int:
        return self.weight.nbytes

    @property
    def weights(self) -> int:
        return self.weight.numel()

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """A float32 linear whose weight lies in the blocks oneDNN's kernels read. At one to eight rows this is up to twice
    as fast as MKL's product, and each row's bits are its own (`is_width_independent` tests that; nobody promises it).

    Attributes:
        bytes: that a product of few rows reads.
        blocks: the packed weight, readable; None where its format is not understood.
        narrow: computes a few rows instead; None, unless `quicken` found it to give the same bits.
        paired: a row alone is computed twice, side by side. Some AVX-512 CPUs have another kernel for one row, which
            sums long rows in another order.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = None if bias is None else bias.clone()
        self._bytes, self.weights, self.paired = weight.nbytes, weight.numel(), False
        self.blocks = _blocks(self.packed, weight)
        self.narrow: NarrowProduct | None = None

    def probe(self) -> PackedLinear:
        """One like it, with weights that show the order of sums: those of a model may be zeros, which hide it."""
        some = torch.randn(_SOME, generator=torch.Generator().manual_seed(0))  # repeated: all anew would take long
        weight = some.repeat(-(-self.weights // _SOME))[: self.weights].view(self.shape)
        return type(self)(weight, None if self.bias is None else some[: self.shape[0]])

    @property
    def bytes(self) -> int:
        return self._bytes if self.narrow is None else min(self._bytes, self.narrow.bytes)  # without padding

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        if narrow := self.narrow_for(len(x)):
            return narrow(x)
        if self.paired and len(x) == 1:
            return self._product(x.repeat(2, 1))[:1]
        return self._product(x)

    def narrow_for(self, rows: int) -> NarrowProduct | None:
        """`narrow`, where so many rows are few."""
        return self.narrow if self.narrow is not None and 0 < rows <= self.narrow.widest else None

    def _product(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out


Linear = PlainLinear | PackedLinear
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


@cache
def can_pack() -> bool:
    """Whether torch's private prepacking ops are there and work on this CPU."""
    try:
        weight, x = torch.randn(48, 32), torch.randn(3, 32)
        return torch.allclose(PackedLinear(weight)(x), x @ weight.T, atol=1e-4)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def is_width_independent(linear: PackedLinear) -> bool:
    """Whether a row's result keeps its bits whatever rows stand beside it, tried on random rows."""
    chunk = max(_ROWS, min(_CHUNK, _OUTPUTS // linear.shape[0]))
    x = torch.randn(chunk, linear.shape[1], generator=torch.Generator().manual_seed(0))
    alone = torch.cat([linear(x[row : row + 1]) for row in range(8)])
    together = linear(x[:_ROWS])
    widths = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 33, 48, 63)
    return (
        torch.equal(alone, together[:8])
        and all(torch.equal(linear(x[:width]), together[:width]) for width in widths)
        and torch.equal(linear(x)[:_ROWS], together)
        and (not linear.narrow_for(chunk) or torch.equal(linear._product(x)[:_ROWS], together))
    )


def quicken(linears: Sequence[PackedLinear], probe: PackedLinear, copies: bool = True) -> bool:
    """Whether a few rows are from now on computed by loops made for that, which linears, all of one shape, allow where
    these give the bits of oneDNN's wide products.

    Args:
        probe: of these, on which that is tried; it is quickened as well.
        copies: of weights in fewer bits may be made.
    """
    from paceline.targets import team  # numba takes half a second to import

    if not team.available() or probe.blocks is None:
        return False
    from paceline.targets.compact import as_they_are, compact
    from paceline.targets.narrow import NarrowProduct, matching_chunk

    x = torch.randn(_ROWS, probe.shape[1], generator=torch.Generator().manual_seed(0))
    chunk = matching_chunk(probe.blocks, probe.shape, probe.bias, x[:_FEW], probe(x)[:_FEW])
    for linear in (probe, *linears) if chunk else ():
        if linear.blocks is not None:  # else there are weights that are no numbers
            fewer = copies and linear is not probe
            weights = compact(linear.blocks, linear.shape[1], chunk) if fewer else as_they_are(linear.blocks)
            linear.narrow = NarrowProduct(weights, linear.shape, linear.bias, chunk)
    return bool(chunk)


def make_width_independent(linears: Sequence[PackedLinear], copies: bool = True) -> bool:
    """Whether linears, all of one shape, are that, or have become so by other loops for a few rows (see `quicken`), or
    `paired`.
    """
    probe = linears[0].probe()
    tried = probe, linears[0]
    if quicken(linears, probe, copies) and all(map(is_width_independent, tried)):
        return True
    for linear in (probe, *linears):
        linear.narrow = None
    if all(map(is_width_independent, tried)):
        return True
    for linear in tried:
        linear.paired = True
    helps = all(map(is_width_independent, tried))
    for linear in linears:
        linear.paired = helps
    return helps


class PackedRows:
    """Rows of a packed weight, read where they lie: an embedding that is tied to the head needs no copy of its own."""

    def __init__(self, linear: PackedLinear, blocks: Tensor) -> None:
        self._keep_alive, self._blocks = linear, blocks

    def __call__(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows size"]:
        block = self._blocks.shape[2]
        if 0 < len(ids) <= _ONE_BY_ONE:
            columns = self._blocks.numpy()[:, : self._keep_alive.shape[1]]
            return torch.from_numpy(np.stack([columns[at // block, :, at % block] for at in ids.tolist()]))
        return self._blocks[ids // block, : self._keep_alive.shape[1], ids % block]

    @classmethod
    def of(cls, linear: PackedLinear, weight: Float[Tensor, "out in"]) -> PackedRows | None:
        """None where the packed format is not understood: every row is compared with the weight's own."""
        if linear.blocks is None:
            return None
        view = cls(linear, linear.blocks)
        return (
            view if all(torch.equal(view(ids), weight[ids]) for ids in torch.arange(len(weight)).split(4096)) else None
        )


def _blocks(packed: Tensor, weight: Float[Tensor, "out in"]) -> Float[Tensor, "blocks inputs outputs"] | None:
    """The memory of a packed weight, in blocks of some outputs each: in the form in which the first and last of them
    are the weight's.
    """
    memory, (rows, columns) = _raw(packed), weight.shape
    for size in _BLOCKS if memory is not None else ():
        assert memory is not None
        count = -(-rows // size)
        if memory.numel() % (count * size) == 0 and memory.numel() // (count * size) >= columns:
            blocks = memory.view(count, -1, size)
            last = weight[(count - 1) * size :]
            if torch.equal(blocks[0, :columns, : min(size, rows)].T, weight[:size]) and torch.equal(
                blocks[-1, :columns, : len(last)].T, last
            ):
                return blocks
    return None


def _raw(packed: Tensor) -> Tensor | None:
    """The memory of an opaque oneDNN tensor, as floats; valid as long as the tensor lives."""
    try:
        address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError):
        return None
    floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(floats, (size // 4,)))
