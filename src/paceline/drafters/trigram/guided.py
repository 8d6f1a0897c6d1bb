"""A guide in the native tier's library, for the searcher there. The structure mirrors guide.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int8, Integer
from torch import Tensor, nn

from paceline.drafters.trigram.kernels import kernels
from paceline.drafters.trigram.native import ngrams_of
from paceline.drafters.trigram.overlay import Overlay
from paceline.drafters.trigram.structures import WIDTH, empty_counts, place_of
from paceline.drafting.output_rows import embedding_rows, gathers_rows, output_rows
from paceline.targets.linear import linear_module
from paceline.targets.native.build import library
from paceline.targets.native.memory import Arena
from paceline.targets.native.storage import Storage
from paceline.targets.native.weights import CMatrix, Packed
from paceline.targets.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.drafters.trigram.guide import Guide
    from paceline.drafters.trigram.matrix import Matrix
    from paceline.drafters.trigram.structures import Rule

Rows = Callable[[Int[Tensor, " n"]], Float[Tensor, "n hidden"]]

LINE = 64  # bytes
SOME = 4096  # rows at a time


class CGuide(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embeddings", "outputs", "units")),
        ("tokens", c_int64),
        *((name, CMatrix) for name in ("enter", "think", "ask")),
        *((name, c_void_p) for name in ("weigh", "weigh_bias")),
        *((name, c_int32) for name in ("hidden", "rank", "inner", "stride")),
        ("workspace", c_void_p),
    )


class TokenRows(NamedTuple):
    """Rows of the target's matrices, which it keeps in whatever form.

    Attributes:
        tokens: all there are.
        outputs, embeddings: those of some ids, in float32 on the CPU; without embeddings they are the outputs' rows.
    """

    tokens: int
    outputs: Rows
    embeddings: Rows | None = None


def rows_of(target: Target) -> TokenRows:
    """The rows of one of our targets."""

    def outputs(ids: Int[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        return output_rows(target, ids).float().cpu()

    def embeddings(ids: Int[Tensor, " n"]) -> Float[Tensor, "n hidden"]:
        return embedding_rows(target, ids).float().cpu()

    return TokenRows(target.vocab_size, outputs, None if gathers_rows(target) else embeddings)


class LibraryGuide:
    """What the C++ code reads of a guide: its matrices in blocks of 4 bits, and the target's embeddings and output rows
    in 8 bits as well, row by row.

    Attributes:
        c: the structure, which points into this.
    """

    def __init__(self, guide: Guide, rows: TokenRows) -> None:
        sizes = guide.config.hidden, guide.config.rank, guide.config.inner
        outputs, units = _in_bytes(rows.tokens, sizes[0], rows.outputs)
        embeddings = _in_bytes(rows.tokens, sizes[0], rows.embeddings)[0] if rows.embeddings else outputs
        matrices = [_packed(part) for part in (guide.enter, guide.think, guide.ask)]
        weigh = [part.detach().float().cpu().contiguous() for part in (guide.weigh.weight, guide.weigh.bias)]
        workspace = Arena().take(4 * library().paceline_guide_floats(*sizes)).zero_()
        self._keep = outputs, units, embeddings, matrices, weigh, workspace
        addresses = (tensor.data_ptr() for tensor in (embeddings, outputs, units))
        read = (*(matrix.c for matrix in matrices), *(part.data_ptr() for part in weigh))
        self.c = CGuide(*addresses, len(outputs), *read, *sizes, outputs.shape[1], workspace.data_ptr())


def _in_bytes(tokens: int, hidden: int, rows: Rows) -> tuple[Int8[Tensor, "all stride"], Float[Tensor, " all"]]:
    """Rows of all tokens in 8 bits, each in whole lines of memory, and what each counts in."""
    stride = -(-hidden // LINE) * LINE
    found, units = Arena().take(tokens * stride).view(torch.int8).view(tokens, stride), torch.empty(tokens)
    for ids in torch.arange(tokens).split(SOME):
        some, first = rows(ids).contiguous(), int(ids[0])
        places = found[first].data_ptr(), units[first:].data_ptr()
        library().paceline_guide_rows(some.data_ptr(), *some.shape, stride, *places)
    return found, units


def _packed(part: nn.Linear) -> Packed:
    """A copy in blocks of 4 bits, or as it is where its rows are no whole blocks."""
    bias = None if part.bias is None else part.bias.detach().float().cpu()
    packed = Storage("rounded", None, 0, {}).pack({"guide": linear_module(part.weight.detach().float().cpu(), bias)})
    packed.round_inputs()
    return packed


def follow_up(
    matrix: Matrix, rule: Rule, ids: Sequence[int], first: int
) -> tuple[Integer[np.ndarray, "n WIDTH"], Float[np.ndarray, "n WIDTH"], Float[np.ndarray, "n WIDTH"]]:
    """What may follow `ids[: at + 1]`, for each `at` from `first` on, as drafts of a text that grows see it: tokens, -1
    after the last; their probabilities; and what of these the text's own counts give.
    """
    overlay = Overlay(rule.order, room=rule.order * (len(ids) + 1), compiled=kernels(native=True))
    overlay.learn(ids[:first], 0)
    tail, shape = array("q", ids), (len(ids) - first, WIDTH)
    tokens, probs, own = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    read = ngrams_of(matrix.tables[matrix.order - rule.order :], overlay.place, place_of(empty_counts(1)), rule)
    outputs = (each.ctypes.data for each in (tokens, probs, own))
    place = tail.buffer_info()[0], len(tail), first, overlay.shortest
    library().paceline_ngrams_follow_up(byref(read), *place, *outputs)
    return tokens, probs, own
