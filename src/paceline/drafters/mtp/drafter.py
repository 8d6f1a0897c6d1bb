"""Multi-token prediction (Gloeckle et al., 2024; DeepSeek-V3, 2024): a layer that came with the model drafts."""

from __future__ import annotations

from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.mtp.forward import MtpForward
from paceline.drafters.mtp.layers import take_mtp
from paceline.drafting.autoregressive import AutoregressiveDrafter
from paceline.drafting.base import Row
from paceline.drafting.budget import AUTO
from paceline.drafting.tree import TokenTree
from paceline.targets.target import PREFILL_CHUNK, PassOutput, Target


class Mtp(Eagle):
    """Many models are published with a layer that was trained to tell the token after the next one: an EAGLE head in
    all but name, which is drafted with in the same way. Of several such layers the first drafts, again and again.

    Args:
        head: "auto": the layers in the target's own files; a folder or hub id: in those of another model, as where a
            fine-tuned one was saved without them; or (from Python) transformers' `MtpModel`.
        tree: as for `eagle`.
        budget: as for `eagle`.
        copy: as for `eagle`.
    """

    source = "mtp"
    files = ()  # a hub id will do

    def __init__(
        self,
        target: Target,
        *,
        head: str = AUTO,
        tree: int = 1,
        budget: int | str = AUTO,
        copy: bool | str = "auto",
    ) -> None:
        AutoregressiveDrafter.__init__(self, target, copy=copy, chain=tree == 1)
        self.take_options(tree, budget)
        self.draft_by(MtpForward(take_mtp(head, target), target))
        self.hidden_width = target.config.hidden_size if target.has_blocks else None

    @property
    def kept_taps(self) -> tuple[int, ...]:
        return self.taps

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        super().observe(row, tree, path, out)
        if len(row.state.waiting) >= PREFILL_CHUNK:  # all of it will be read: states take more room than keys
            self.forward.catch_up([row])
