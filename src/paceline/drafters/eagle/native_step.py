"""Draft steps of EAGLE's heads on the native tier: tokens and states in, states and logits out, in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.targets.native import NativeTarget
from paceline.targets.parts import Norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from paceline.drafters.eagle.eagle3_head import Eagle3Head
    from paceline.drafters.eagle.head import EagleHead
    from paceline.targets.native.linear import RoundedLinear
    from paceline.targets.native.target import Ranked

    Made = tuple[Float[Tensor, "batch width hidden"], Ranked | None]


class NativeSteps:
    """For heads whose layers are plain ones: EAGLE-1's, which reads features of the target beside the token, and those
    of EAGLE-3 whose token is added to the state.

    Args:
        layers: the head's own.
        fc, token_in: the head's, packed.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        layers: NativeTarget,
        target: NativeTarget,
        fc: RoundedLinear,
        token_in: RoundedLinear | None,
    ) -> None:
        self._layers, hidden = layers, target.config.hidden_size
        if token_in is None:
            self._nodes = replace(target.entry, matrix=fc.packed, joined=True)
            self._roots = replace(self._nodes, piece_norm=target.native.norm)
        else:
            self._nodes = replace(target.entry, matrix=token_in.packed, norm=_norm(head.entry_norm))
            plain = Norm(torch.ones(hidden), None, head.config.model["rms_norm_eps"])
            self._roots = replace(self._nodes, piece_norm=plain, fuse=fc.packed)

    def roots(self, hidden: Sequence[Float[Tensor, "batch width hidden"]], *step: Any) -> Made:
        """From what the target's layers gave; for `step` see `NativeTarget.step`."""
        return self._layers.step(self._roots, hidden, *step)

    def nodes(self, states: Float[Tensor, "batch width hidden"], *step: Any) -> Made:
        """From what the step before guessed."""
        return self._layers.step(self._nodes, [states], *step)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach().float().contiguous(), None, module.eps)
