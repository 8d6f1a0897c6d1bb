"""Lossless verification: which drafted tokens stand, and which token the target adds.

`verify` judges a round: each request names its `Verification`, and pure functions of its tree and of the target's
distributions `p` at the tree's nodes do the rest. Under each of them the output is distributed exactly as plain
decoding would: that is the whole of paceline's losslessness, and it is tested here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from paceline.drafting.tree import TokenTree
    from paceline.targets.target import PassOutput

Uniform = Callable[[], float]  # the next of a stream of independent draws from [0, 1)
Draw = Callable[[Tensor, float, float], int]  # of scores, a quantile and a temperature


class Verification(Enum):
    """How a request's trees are verified."""

    ARGMAX = "follow the likeliest token of the raw logits"
    GREEDY = "follow the likeliest token of the processed scores"
    MATCH = "sample at every node and follow what was drawn"
    REJECTION = "speculative sampling: accept drafted tokens with min(1, p / q)"
    SCRIPT = "follow a known text, whatever the target says"


#: What is decided by the likeliest token of each node, or by none.
NEEDING_NO_LOGITS = (Verification.ARGMAX, Verification.SCRIPT)


class VerifiedRequest(Protocol):
    """What verification needs of a request."""

    slot: int

    def verification(self, tree: TokenTree) -> Verification:
        """Which verification this tree gets."""
        ...

    @property
    def temperature(self) -> float | None:
        """Where scores are logits divided by this, and nothing else is done to them."""
        ...

    def scores(
        self, tree: TokenTree, logits: Float[Tensor, "nodes vocab"], nodes: Sequence[int] | None = None
    ) -> Float[Tensor, "_ vocab"]:
        """The processed logits of some of the tree's nodes; None: of all."""
        ...

    def script(self, tree: TokenTree) -> list[int]:
        """The known text's token after each node."""
        ...

    def position_uniforms(self, count: int) -> list[float]:
        """The random numbers of the next `count` output positions."""
        ...

    def uniform(self) -> float:
        """The next random number of a rejection."""
        ...


class Outcome(NamedTuple):
    path: list[int]  # accepted nodes, root first
    token: int  # the target's own token after them


def verify(
    rows: Sequence[VerifiedRequest],
    trees: Sequence[TokenTree],
    out: PassOutput,
    drawing: Draw | None = None,
) -> list[Outcome]:
    """The outcome of each row's tree, which the target has read, under the verification that it names.

    Args:
        drawing: see `Target.draw`.
    """
    chosen = [row.verification(tree) for row, tree in zip(rows, trees, strict=True)]
    likeliest: list[list[int]] = []
    if Verification.ARGMAX in chosen:  # of all rows at once
        likeliest = out.choices()
    outcomes = []
    for row, tree, how in zip(rows, trees, chosen, strict=True):
        if how is Verification.ARGMAX:
            outcomes.append(walk(tree, likeliest[row.slot]))
        elif how is Verification.SCRIPT:
            outcomes.append(walk(tree, row.script(tree)))
        else:
            outcomes.append(_by_logits(row, tree, how, out.row(row.slot, len(tree)).logits, drawing or at_quantile))
    return outcomes


def _by_logits(
    row: VerifiedRequest, tree: TokenTree, how: Verification, logits: Float[Tensor, "nodes vocab"], drawing: Draw
) -> Outcome:
    if how is Verification.MATCH and logits.device.type == "cpu":
        temperature = row.temperature

        def drawn(node: int, u: float) -> int:
            if temperature is None:
                return drawing(row.scores(tree, logits, [node])[0], u, 1.0)
            return drawing(logits[node], u, temperature)

        return draw_along(tree, drawn, row.position_uniforms(tree.depth + 1))
    scores = row.scores(tree, logits)
    if how is Verification.GREEDY:
        return walk(tree, scores.argmax(-1).tolist())
    if how is Verification.MATCH:
        return sample_match(tree, scores, row.position_uniforms(tree.depth + 1))
    p = scores.softmax(-1)
    return (chain_rejection if tree.is_chain else tree_rejection)(tree, p, row.uniform)


def walk(tree: TokenTree, choice: Sequence[int]) -> Outcome:
    """Follow the target's choice at each node as far as the tree goes.

    Greedy decoding: `choice` is the argmax at each node. Sampling: `choice[i]` is drawn from p at node i, whatever was
    drafted (sample-match); for a fixed set of children this accepts with the highest possible probability, the sum
    of p over them.
    """
    path = [0]
    while (child := tree.child(path[-1], choice[path[-1]])) is not None:
        path.append(child)
    return Outcome(path, choice[path[-1]])


def draw(p: Float[Tensor, " vocab"], u: float) -> int:
    """The token at quantile `u` of `p`, which need not be normalised: the inverse of its distribution function."""
    # float64: in float32 the sum over a large vocabulary is off by more than small probabilities.
    mass = p.double().cumsum(0)
    return int(torch.searchsorted(mass, u * mass[-1], right=True).clamp_(max=len(p) - 1))


def at_quantile(scores: Float[Tensor, " vocab"], u: float, temperature: float) -> int:
    """The token at quantile `u` of softmax(scores / temperature)."""
    return draw((scores.float() / temperature).softmax(-1), u)


def draw_along(tree: TokenTree, drawn: Callable[[int, float], int], uniforms: Sequence[float]) -> Outcome:
    """`sample_match`, drawing at the nodes only that it comes by, one after the other: what a CPU does in less time. A
    GPU had better be asked once a round.

    Args:
        drawn: what is drawn at a node with a uniform number.
    """
    path = [0]
    for u in uniforms:
        token = drawn(path[-1], u)
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return Outcome(path, token)


def sample_match(tree: TokenTree, scores: Float[Tensor, "nodes vocab"], uniforms: Sequence[float]) -> Outcome:
    """Sample at every node and walk.

    Args:
        uniforms: one draw a depth. Drawn by output position, they make sampled output the same as plain decoding's
            with that seed, whatever drafts.
    """
    u = torch.tensor([uniforms[depth] for depth in tree.depths], dtype=torch.float64, device=scores.device)
    mass = scores.softmax(-1).double().cumsum(1)
    choice = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True).clamp_(max=scores.shape[1] - 1)
    return walk(tree, choice[:, 0].tolist())


def chain_rejection(tree: TokenTree, p: Float[Tensor, "nodes vocab"], uniform: Uniform) -> Outcome:
    """Speculative sampling of a chain (Leviathan et al., 2023): accept token x with probability min(1, p(x)/q(x));
    at the first rejection sample from norm(max(0, p - q)), after the last acceptance from p.
    """
    for node in range(1, len(tree)):
        p_node, q, token = p[node - 1], tree.q[node], tree.tokens[node]
        if not uniform() * float(_at(q, token)) < float(p_node[token]):
            return Outcome(list(range(node)), draw(_residual(p_node, q, token), uniform()))
    return Outcome(list(range(len(tree))), draw(p[len(tree) - 1], uniform()))


def tree_rejection(tree: TokenTree, p: Float[Tensor, "nodes vocab"], uniform: Uniform) -> Outcome:
    """Recursive rejection over siblings (SpecInfer; without replacement as in Sequoia and RSD).

    Each sibling is tried against what its predecessors' rejections left of p. When siblings were drawn without
    replacement, q is renormalised without those tried before.
    """
    path = [0]
    while True:
        left = p[path[-1]]
        tried: list[int] = []
        for child in tree.children(path[-1]):
            token, q = tree.tokens[child], tree.q[child]
            if q is not None and tried and not tree.replacement:
                q = q.index_fill(0, torch.tensor(tried, device=q.device), 0.0)
                q = q / q.sum()
            if uniform() * float(_at(q, token)) < float(left[token]):
                path.append(child)
                break
            left = _residual(left, q, token)
            if q is not None:
                tried.append(token)
        else:
            return Outcome(path, draw(left, uniform()))


def _at(q: Float[Tensor, " vocab"] | None, token: int) -> float | Tensor:
    return 1.0 if q is None else q[token]


def _residual(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"] | None, token: int) -> Float[Tensor, " vocab"]:
    """norm(max(0, p - q)); a deterministic proposal is a point mass."""
    left = p.index_fill(0, torch.tensor([token], device=p.device), 0.0) if q is None else (p - q).clamp_(min=0)
    total = left.sum()
    # Where p equals q a rejection has probability 0, but for rounding: then p itself is the answer.
    return left / total if total > 0 else p
