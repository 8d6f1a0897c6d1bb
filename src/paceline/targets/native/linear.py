"""A linear layer on its own in the native tier's kernels, for what drafters have beside their decoder layers."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.targets.linear import linear_module
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.storage import OUTPUT, Storage


class RoundedLinear:
    """`W x + b` with W in blocks of 4 bits (where its rows are whole blocks) and x in blocks of 8: reading W is what a
    draft's time goes into. Not exact, as drafts need not be.

    Args:
        output: it makes logits, where 4 bits would cost too many drafts: W is in blocks of 8.
    """

    def __init__(
        self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None, output: bool = False
    ) -> None:
        name = OUTPUT if output else "linear"
        self.packed = Storage("rounded", None, 0, {}).pack({name: linear_module(weight, bias)})
        self.bytes = self.packed.bytes
        self._model = NativeModel(Sizes(weight.shape[1]), [], None, self.packed)
        self._model.round_inputs()

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return self._model.head(x.contiguous(), normed=True)
