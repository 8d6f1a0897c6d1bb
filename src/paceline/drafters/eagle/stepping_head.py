"""What EAGLE's heads of both forms are: heads that draft step by step, on states of their own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.drafting.sharing_head import SharingHead

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


class SteppingHead(SharingHead):
    """At position t it reads the target's hidden states there and token t + 1, and makes a state from which token t + 2
    is told; in the next step of a draft that state stands for the target's.
    """

    @property
    @abstractmethod
    def reads(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads, ascending; see `Eagle3Config.taps`. Empty: its features."""

    @property
    def shallow(self) -> int:
        """See `Eagle3Config`."""
        return 0

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The layers, as the decoder of a Hugging Face model."""

    @abstractmethod
    def fused(self, states: Float[Tensor, "batch tokens read"]) -> Float[Tensor, "batch tokens hidden"]:
        """What the first step of a draft reads in place of a state of the head's own."""

    @abstractmethod
    def tokens_in(
        self, states: Float[Tensor, "batch tokens read"], ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What comes in of tokens: their embeddings, or their own state among what is read of the target."""

    @abstractmethod
    def entered(
        self, state: Float[Tensor, "batch tokens hidden"], token: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens width"]:
        """What the layers read: `state` at position t with what comes in of the token at t + 1."""

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
            states: of the target at positions 0, 1, ...: what `fused` reads. A head that reads the tokens' own states
                needs one more than there are `ids`.
            ids: of the tokens at positions 1, 2, ...: what follows each.
            positions: of the states; 0, 1, ... by default.
            mask: 1 for what is there, 0 for padding.
        """
        state, token = self.fused(states[:, : ids.shape[1]]), self.tokens_in(states[:, 1:], ids)
        return self.run(state, token, positions, mask)

    def run(
        self, state: Tensor, token: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "batch tokens hidden"]:
        """`forward` on what may be states of the head's own."""
        entered = self.entered(state, token)
        out = self.decoder(inputs_embeds=entered, position_ids=positions, attention_mask=mask, use_cache=False)
        made: Tensor = out.last_hidden_state
        return made
