"""Multi-token prediction (Gloeckle et al., 2024; DeepSeek-V3, 2024): a layer that came with the model drafts."""

from __future__ import annotations

from paceline.drafters.mtp.forward import MtpForward
from paceline.drafters.mtp.layers import take_mtp
from paceline.drafting.stepping.drafter import SteppingDrafter
from paceline.registry import AUTO
from paceline.targets.target import Target


class Mtp(SteppingDrafter):
    """Many models are published with a layer that was trained to tell the token after the next one: an EAGLE head in
    all but name, which is drafted with in the same way. Of several such layers the first drafts, again and again.

    Args:
        head: "auto": the layer in the target's own files; a folder or hub id: in those of another model, as where a
            fine-tuned one was saved without it; or (from Python) transformers' `MtpModel`.
        tree, budget: see `SteppingDrafter`.
        copy: whether chains copy from the request's text where it repeats itself (see `Copies`); "auto": under policies
            that say so, as `pace` does.
    """

    source = "mtp"

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        tree: int = 1,
        budget: int | str = AUTO,
        copy: bool | str = AUTO,
    ) -> None:
        super().__init__(target, tree, budget, copy)
        self.draft_by(MtpForward(take_mtp(head, target), target))
