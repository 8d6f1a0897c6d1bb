"""What EAGLE's heads of both forms are: heads that draft step by step, on states of their own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.drafting.heads import TrainedHead

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


class SteppingHead(TrainedHead):
    """At position t it reads the target's hidden states there and token t + 1, and makes a state from which token t + 2
    is told; in the next step of a draft that state stands for the target's.
    """

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The layers, as the decoder of a Hugging Face model."""

    @abstractmethod
    def fused(self, states: Float[Tensor, "batch tokens read"]) -> Float[Tensor, "batch tokens hidden"]:
        """What the first step of a draft reads in place of a state of the head's own."""

    @abstractmethod
    def entered(
        self, state: Float[Tensor, "batch tokens hidden"], ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens width"]:
        """What the layers read: `state` at position t with the token at t + 1, `ids`."""

    @abstractmethod
    def outputs(self, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the tokens that can be drafted."""

    def forward(
        self,
        states: Float[Tensor, "batch tokens read"],
        ids: Int[Tensor, "batch tokens"],
        positions: Int[Tensor, "batch tokens"] | None = None,
        mask: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """The head's states, for whole texts.

        Args:
            states: of the target at positions 0, 1, ...: what `fused` reads.
            ids: of the tokens at positions 1, 2, ...: what follows each.
            positions: of the states; 0, 1, ... by default.
            mask: 1 for what is there, 0 for padding.
        """
        return self.run(self.fused(states), ids, positions, mask)

    def run(
        self, state: Tensor, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "batch tokens hidden"]:
        """`forward` on what may be states of the head's own."""
        entered = self.entered(state, ids)
        out = self.decoder(inputs_embeds=entered, position_ids=positions, attention_mask=mask, use_cache=False)
        made: Tensor = out.last_hidden_state
        return made
