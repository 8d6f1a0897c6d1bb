"""A linear layer on its own in the native tier's kernels, for what drafters have beside their decoder layers."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.targets.linear import linear_module
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.storage import Storage


class RoundedLinear:
    """`W x + b` with W and x in blocks of 8 bits (where W's rows are whole blocks): a quarter of the bytes of float32
    are what a draft's time goes into. Not exact, as drafts need not be.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> None:
        self.packed = Storage("rounded", None, 0, {}).pack({"linear": linear_module(weight, bias)})
        self.bytes = self.packed.bytes
        self._model = NativeModel(Sizes(weight.shape[1]), [], None, self.packed)
        self._model.round_inputs()

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return self._model.head(x.contiguous(), normed=True)
