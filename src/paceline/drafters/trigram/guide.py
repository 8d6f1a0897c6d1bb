"""The guide: from a hidden state of the target, which of the n-grams' candidates comes next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafting.heads import HeadConfig, TrainedHead, config_name, with_blocks
from paceline.errors import require
from paceline.targets.families import embedding_matrix, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.reference import as_target
from paceline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHIPPED = Path(__file__).parents[2] / "data" / "guide"  # a folder for each guide that comes with paceline
BLOCK = 32  # of numbers that its matrices are stored in, see the native tier
EPSILON = 1e-5  # of norms
LEAST = 1e-4  # of a probability whose logarithm is taken
SHARE = 0.3  # of the linear guess in the first logits: n-grams know more than that


@dataclass(frozen=True, kw_only=True)
class GuideConfig(HeadConfig):
    """What a guide is.

    Attributes:
        hidden: size of the target's hidden states.
        rank: of what it makes of a state and a token.
        inner: of its hidden layer.
    """

    hidden: int
    rank: int = 256
    inner: int = 256

    def __post_init__(self) -> None:
        for name in ("rank", "inner"):
            size = getattr(self, name)
            require(size >= BLOCK and size % BLOCK == 0, f"a guide's {name} is a multiple of {BLOCK}, not {size}")


class Guide(TrainedHead):
    """Chooses among the n-grams' candidates for a token.

    At position t it reads what leaves the target's last layer, h(t), and token t + 1, which was told by that:

        s = enter [h(t) / rms, e(token t + 1) / rms]        e: the target's embeddings
        a = SiLU(think (s / rms))
        q = ask [s, a]
        w = weigh a

    Candidate c for token t + 2, which n-grams give the probability p, of it p_own from the text's own, has the logit
    `w1 log p + w2 p + w3 p_own + q . W(c)`, with W(c) its row of the target's output matrix; that it is none of them,
    `w4`. So its time does not depend on the size of the vocabulary, and there is no attention: the state has seen the
    text.

    Attributes:
        embedding, matrix: the target's, of all tokens; None until it is known. Neither is trained or stored.
    """

    kind, title, Config = "guide", "guide", GuideConfig
    config: GuideConfig
    embedding: Float[Tensor, "all hidden"] | None
    matrix: Float[Tensor, "all hidden"] | None

    def __init__(
        self,
        config: GuideConfig,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__(config, fingerprint, tokens)
        size, rank, inner = config.hidden, config.rank, config.inner
        self.enter = nn.Linear(2 * size, rank, bias=False)
        self.think = nn.Linear(rank, inner)
        self.ask = nn.Linear(rank + inner, size, bias=False)
        self.weigh = nn.Linear(inner, 4)
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("matrix", None, persistent=False)

    @classmethod
    def from_target(
        cls, model: PreTrainedModel, *, rank: int = 256, inner: int = 256, name: str | None = None, seed: int = 0
    ) -> Self:
        """A guide to train, in float32, that says what the n-grams say.

        Args:
            rank, inner: see `GuideConfig`.
            name: of the target; by default as the model says.
            seed: of what is drawn.

        Raises:
            OptionError: a number out of range.
            UnsupportedModel: a model whose layers do not run one by one.
        """
        target = with_blocks(as_target(model), cls.kind)
        config = GuideConfig(hidden=target.config.hidden_size, rank=rank, inner=inner, target=name or model_key(target))
        made = cls(config, probe_features(target))
        made._start(seed)
        made.know(embedding_matrix(model), output_matrix(model))
        return made

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        for part in (self.enter, self.think):
            part.weight.copy_(torch.randn(part.weight.shape, generator=drawn) * part.in_features**-0.5)
        for zero in (self.think.bias, self.ask.weight, self.weigh.weight):
            zero.zero_()
        self.weigh.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    @torch.no_grad()
    def start_from(self, linear: Float[Tensor, "hidden twice"], inputs: Float[Tensor, "n twice"]) -> None:
        """Begin with the linear guess of the next feature from such `inputs` (see `read`), as far as its rank goes."""
        guessed = inputs @ linear.T
        leading = torch.linalg.eigh(guessed.T @ guessed / len(guessed)).eigenvectors[:, -self.config.rank :]
        rank = leading.shape[1]  # a state may be smaller
        self.enter.weight[:rank] = leading.T @ linear
        self.ask.weight[:, :rank] = SHARE * leading

    @classmethod
    def _folders(cls, target: Target) -> Iterator[Path]:
        yield from super()._folders(target)
        yield from (path.parent for path in sorted(SHIPPED.glob(f"*/{config_name(cls.kind)}")))

    def know(self, embedding: Float[Tensor, "all hidden"], output: Float[Tensor, "all hidden"]) -> None:
        """Take the target's matrices, which the guide shares."""
        self.embedding, self.matrix = embedding.float(), output.float()

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"] | None:
        return probe_features(target) if target.config.hidden_size == self.config.hidden else None

    def read(self, states: Float[Tensor, "n hidden"], ids: Int[Tensor, " n"]) -> Float[Tensor, "n twice"]:
        """What enters: states, and the embeddings of the tokens after them, each of root mean square 1."""
        assert self.embedding is not None
        return torch.cat([normed(states), normed(functional.embedding(ids, self.embedding))], -1)

    def forward(
        self,
        states: Float[Tensor, "n hidden"],
        ids: Int[Tensor, " n"],
        candidates: Int[Tensor, "n k"],
        probs: Float[Tensor, "n k"],
        own: Float[Tensor, "n k"],
    ) -> Float[Tensor, "n k+1"]:
        """Logits of the candidates, and of none of them.

        Args:
            states: what left the target's last layer.
            ids: the tokens after them.
            candidates: for the tokens after these; -1 where there are fewer.
            probs, own: what all n-grams give to them, and of it the text's own.
        """
        assert self.matrix is not None
        entered = self.enter(self.read(states, ids))
        thought = functional.silu(self.think(normed(entered)))
        query, weights = self.ask(torch.cat([entered, thought], -1)), self.weigh(thought)
        known = torch.stack([probs.clamp(min=LEAST).log(), probs, own], -1)
        rows = functional.embedding(candidates.clamp(min=0), self.matrix)
        logits = (known @ weights[:, :3, None] + rows @ query[..., None])[..., 0]
        return torch.cat([logits.masked_fill(candidates < 0, -torch.inf), weights[:, 3:]], -1)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters, all of them trained, by part; and their `total`."""
        parts = {name: sum(weight.numel() for weight in part.parameters()) for name, part in self.named_children()}
        return {**parts, "total": sum(parts.values())}


def normed(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Of root mean square 1."""
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)
