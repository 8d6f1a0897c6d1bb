"""Predictors of acceptance: small networks over what a policy sees of a token before it is drawn."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.policies.sureness import entropy

STEPS = 10  # depths with parameters of their own; deeper tokens share the last (EESD, eq. 5)
TOP = 10  # largest draft probabilities that predictors see

#: Log-odds of acceptance: constant, entropy, top-1 probability, margin, depth / STEPS. See docs/stop-predictors.md.
BUILT_IN = (-0.6, 0.1, 1.3, 1.8, 0.1)


class Seen(NamedTuple):
    """What there is to see of drafted tokens, one a row."""

    signals: Float[Tensor, "tokens signals"]  # of q: entropy in nats, then its TOP largest probabilities
    depth: Int[Tensor, " tokens"]
    target: Float[Tensor, "tokens width"] | None = None  # see `StoppingPolicy.begin_round`
    draft: Float[Tensor, "tokens draft_width"] | None = None  # see `StoppingPolicy.keep`


def signals(q: Float[Tensor, " vocab"] | None) -> Float[Tensor, " signals"]:
    """Entropy and the TOP largest probabilities of q; None is a point mass."""
    found = torch.zeros(1 + TOP)
    if q is None:
        found[1] = 1.0
        return found
    found[0] = entropy(q)
    largest = q.topk(min(TOP, len(q))).values
    found[1 : 1 + len(largest)] = largest
    return found


class Predictor(nn.Module):
    """The probability that a token about to be drawn will be accepted, given that all before it are.

    Attributes:
        kind: name of the form, in files.
        shape: the constructor's arguments.
    """

    kind: ClassVar[str]
    reads_q: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False

    def __init__(self, **shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, seen: Seen) -> Float[Tensor, " tokens"]:
        """Log-odds of acceptance."""
        raise NotImplementedError

    def begin(self, log_odds: float) -> None:
        """Before training: say this of every token. A form that knows better may ignore it."""

    def see(self, q: Tensor | None, depth: int, target: Tensor | None, draft: Tensor | None) -> Seen:
        """One token, as the policy is shown it; hidden states that are not there yet are zeros."""

        def row(hidden: Tensor | None, width: str) -> Tensor | None:
            if not self.reads_hidden or width not in self.shape:
                return None
            return torch.zeros(1, self.shape[width]) if hidden is None else hidden[None].float().cpu()

        shown = signals(q) if self.reads_q else torch.zeros(1 + TOP)
        return Seen(shown[None], torch.tensor([depth]), row(target, "width"), row(draft, "draft_width"))

    @torch.inference_mode()
    def probability(self, seen: Seen) -> float:
        return float(self(seen)[0].sigmoid())


class FeaturePredictor(Predictor):
    """A logistic regression over entropy, top-1 probability, margin and depth of q. Works for any drafter."""

    kind = "features"
    reads_q = True

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(BUILT_IN))

    @staticmethod
    def features(seen: Seen) -> Float[Tensor, "tokens 5"]:
        entropy, first, second = seen.signals[:, :3].unbind(-1)
        depth = seen.depth.clamp(max=STEPS) / STEPS
        return torch.stack([torch.ones_like(first), entropy, first, first - second, depth], -1)

    def forward(self, seen: Seen) -> Tensor:
        return self.features(seen) @ self.weights


class HiddenPredictor(Predictor):
    """Cali-TS's predictor, sigmoid(W_p [W^i h_target; h_draft]) with i = min(depth + 1, STEPS) (EESD, eq. 5).

    The product of W_p's left half with W^i is stored instead of W^i, which changes nothing and is d numbers in place of
    d^2: eq. 5 has nothing between the two. With `units` > 1, W_p is Algorithm 3's "MLP", a hidden layer of that size.
    """

    kind = "hidden"
    reads_hidden = True

    def __init__(self, width: int, draft_width: int, units: int = 1) -> None:
        super().__init__(width=width, draft_width=draft_width, units=units)
        self.scale_target, self.scale_draft = Standardise(width), Standardise(draft_width)
        self.target = nn.Parameter(torch.zeros(STEPS, units, width))
        self.draft = nn.Parameter(torch.zeros(units, draft_width))
        self.bias = nn.Parameter(torch.zeros(units))
        self.out = nn.Linear(units, 1) if units > 1 else None

    def forward(self, seen: Seen) -> Tensor:
        of_target = self.target[seen.depth.clamp(max=STEPS - 1)] @ self.scale_target(seen.target)[..., None]
        mixed = of_target[..., 0] + self.scale_draft(seen.draft) @ self.draft.T + self.bias
        out: Tensor = self.out(nn.functional.silu(mixed)) if self.out else mixed
        return out[:, 0]

    def begin(self, log_odds: float) -> None:
        if self.out:
            nn.init.normal_(self.draft, std=self.draft.shape[1] ** -0.5)
            _begin(self.out, log_odds)
        else:
            self.bias.data.fill_(log_odds)


class ResidualPredictor(Predictor):
    """SpecDec++'s acceptance prediction head: residual blocks on the draft's last hidden state."""

    kind = "residual"
    reads_hidden = True

    def __init__(self, draft_width: int, blocks: int = 3) -> None:
        super().__init__(draft_width=draft_width, blocks=blocks)
        self.scale = Standardise(draft_width)
        self.blocks = nn.ModuleList(nn.Linear(draft_width, draft_width) for _ in range(blocks))
        for weight in self.blocks.parameters():  # each block begins as the identity
            nn.init.zeros_(weight)
        self.out = nn.Linear(draft_width, 1)

    def forward(self, seen: Seen) -> Tensor:
        hidden = self.scale(seen.draft)
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        out: Tensor = self.out(hidden)
        return out[:, 0]

    def begin(self, log_odds: float) -> None:
        _begin(self.out, log_odds)


class TopPredictor(Predictor):
    """DISCO's classifier: a small feed-forward network over the largest draft probabilities and the depth."""

    kind = "top"
    reads_q = True

    def __init__(self, units: int = 64) -> None:
        super().__init__(units=units)
        self.net = nn.Sequential(nn.Linear(TOP + 1, units), nn.ReLU(), nn.Linear(units, 1))

    def forward(self, seen: Seen) -> Tensor:
        depth = seen.depth[:, None].clamp(max=2 * STEPS) / STEPS
        out: Tensor = self.net(torch.cat([seen.signals[:, 1:], depth], -1))
        return out[:, 0]

    def begin(self, log_odds: float) -> None:
        _begin(cast("nn.Linear", self.net[-1]), log_odds)


def _begin(last: nn.Linear, log_odds: float) -> None:
    """The last layer gives these, whatever comes in."""
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, log_odds)


class Standardise(nn.Module):
    """Hidden states to the mean 0 and variance 1 they had in training: coordinates may differ a thousandfold."""

    center: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def fit(self, hidden: Float[Tensor, "tokens width"] | None) -> None:
        assert hidden is not None
        self.center = hidden.mean(0)
        self.scale = 1 / hidden.std(0).clamp(min=1e-6)

    def forward(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None, "a predictor of hidden states must be shown them"
        return (hidden - self.center) * self.scale


FORMS: dict[str, type[Predictor]] = {
    form.kind: form for form in (FeaturePredictor, HiddenPredictor, ResidualPredictor, TopPredictor)
}
