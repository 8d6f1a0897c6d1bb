"""Chooses how each matrix is stored: as small as possible, but only as what it exactly is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.targets.native.blocks import SOME, Blocks
from paceline.targets.native.memory import Arena, MappedFiles
from paceline.targets.native.weights import BLOCK, FLOATS, MAX_PARTS, Kind, Packed, Rows

OUTPUT = "lm_head"  # the output matrix, among a model's modules
ROUNDED = Kind.Q4_1  # what others are stored as where they may be rounded

#: The smaller floats that a mode takes where they are exact, in this order.
MODES = {
    "auto": (Kind.BF16, Kind.F16),
    "stored": (Kind.BF16, Kind.F16),
    "blocks": (),
    "bf16": (Kind.BF16,),
    "fp16": (Kind.F16,),
    "fp32": (),
    "rounded": (Kind.BF16, Kind.F16),
}


class Storage:
    """Packs the linear modules of a Hugging Face model, and takes their weights away from it.

    Args:
        mode: "auto" takes the blocks of the GGUF file that the checkpoint was made from where they are exactly its
            weights, else bfloat16 where that is exact, else float16 where that is, else float32. "stored" is the same
            for a model of `stored.load`, whose weights are still in the file: nothing is compared, and only what is
            not taken as blocks is dequantised. "blocks", "bf16" and "fp16" have only float32 to fall back to, matrix
            by matrix; "fp32" is float32 for all. "rounded" is the only one that changes the model, for drafters:
            blocks near the weights, of 8 bits in the output matrix and of 4 in all others.
        source: the GGUF file, if there is one.
        heads: number of heads of the modules that have any, by the last part of their names.
        input_kind: what the products round their inputs to.

    Raises:
        OptionError: unknown mode, or "blocks" without a GGUF file.
        IntegrityError: the GGUF file cannot be read.
    """

    def __init__(
        self,
        mode: str,
        source: Path | None,
        layers: int,
        heads: Mapping[str, int],
        input_kind: Kind = Kind.F32,
    ) -> None:
        if mode not in MODES:
            raise OptionError(f"unknown storage '{mode}' of the native tier; there are {', '.join(MODES)}")
        if mode in ("blocks", "stored") and source is None:
            raise OptionError(f"storage '{mode}' is for models that come from a GGUF file")
        self._mapped, self._arena, self._input_kind = MappedFiles(), Arena(), input_kind
        self._smaller, self._rounded, self._stored = MODES[mode], mode == "rounded", mode == "stored"
        self._blocks = Blocks(source, layers, heads) if source and mode in ("auto", "stored", "blocks") else None

    def pack(self, modules: Mapping[str, nn.Linear | nn.Embedding], interleaved: bool = False) -> Packed:
        """One matrix of the modules of these names: one below the other, or interleaved.

        Modules one below the other whose blocks are of different kinds become a chain of matrices.
        """

        def kind(name: str) -> Kind | None:
            found = self._blocks.matrix(name) if self._blocks else None
            return found.kind if found else None

        alike = [list(modules)]
        if not interleaved and len(modules) <= MAX_PARTS:
            alike = [list(names) for _, names in groupby(modules, kind)]
        chain = [self._pack({name: modules[name] for name in names}, interleaved) for names in alike]
        for matrix, following in pairwise(chain):
            matrix.then(following)
        return chain[0]

    def _pack(self, modules: Mapping[str, nn.Linear | nn.Embedding], interleaved: bool) -> Packed:
        weights = [module.weight.detach() for module in modules.values()]
        if self._rounded and weights[0].shape[1] % BLOCK == 0:
            packed = self._as_rounded(weights, interleaved, Kind.Q8_0 if OUTPUT in modules else ROUNDED)
        else:
            names = list(modules)
            packed = self._as_blocks(names, weights, interleaved) or self._as_floats(names, weights, interleaved)
        if biases := [m.bias.detach() for m in modules.values() if isinstance(m, nn.Linear) and m.bias is not None]:
            packed.set_bias(biases)
        for module in modules.values():
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return packed

    def _as_blocks(self, names: Sequence[str], weights: Sequence[Tensor], interleaved: bool) -> Packed | None:
        found = [self._blocks.matrix(name) for name in names] if self._blocks else []
        parts = [matrix for matrix in found if matrix is not None]
        kind = parts[0].kind if parts else None
        if kind is None or len(parts) < len(names) or any(matrix.kind != kind for matrix in parts):
            return None
        packed = self._packed(kind, parts[0].inputs, [len(matrix.order) for matrix in parts], interleaved)
        for part, (matrix, weight) in enumerate(zip(parts, weights, strict=True)):
            places, first = packed.places(part), 0
            for rows in matrix.order.split(SOME):
                packed.write(matrix.read(first, len(rows)), places[rows])
                if not self._stored and not torch.equal(packed.rows(places[rows]), weight[rows].float()):
                    return None
                self._mapped.release(weight[rows.min() : rows.max() + 1])
                first += len(rows)
        return packed

    def _as_floats(self, names: Sequence[str], weights: Sequence[Tensor], interleaved: bool) -> Packed:
        if self._stored and self._blocks:
            found = map(self._blocks.matrix, names)
            weights = [matrix.whole() for matrix in found if matrix]  # all of them: see `stored.load`
        exact = (kind for kind in self._smaller if all(_are(kind, some) for w in weights for some in w.split(SOME)))
        kind = next(exact, Kind.F32)
        return self._fill(kind, weights, interleaved, lambda some: Rows.of(some.to(FLOATS[kind])).data)

    def _as_rounded(self, weights: Sequence[Tensor], interleaved: bool, kind: Kind) -> Packed:
        def rounded(some: Tensor) -> Tensor:
            return torch.from_numpy(quantize(some.float().numpy(), GGMLQuantizationType[kind.name]))

        return self._fill(kind, weights, interleaved, rounded)

    def _fill(
        self, kind: Kind, weights: Sequence[Tensor], interleaved: bool, stored: Callable[[Tensor], Tensor]
    ) -> Packed:
        packed = self._packed(kind, weights[0].shape[1], [len(weight) for weight in weights], interleaved)
        for part, weight in enumerate(weights):
            for some, places in zip(weight.split(SOME), packed.places(part).split(SOME), strict=True):
                packed.write(stored(some), places)
                self._mapped.release(some)
        return packed

    def _packed(self, kind: Kind, inputs: int, parts: Sequence[int], interleaved: bool) -> Packed:
        return Packed(kind, inputs, parts, interleaved, self._arena, self._input_kind)


def _are(kind: Kind, weights: Tensor) -> bool:
    """Whether that kind of floats has these numbers."""
    return torch.equal(weights.to(FLOATS[kind]).float(), weights.float())
