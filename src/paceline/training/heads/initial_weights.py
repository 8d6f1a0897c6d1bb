"""How heads start: from the target's weights, fitted to the text in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from paceline.drafters.eagle.eagle3_head import of_tap
from paceline.drafters.medusa.head import OF_TARGET, MedusaHead
from paceline.errors import DataError
from paceline.training.data.dataset import IGNORE, Batch, Dataset
from paceline.training.heads.head_task import ahead
from paceline.training.objectives import soft_labels

if TYPE_CHECKING:
    from paceline.drafters.dflash.head import DFlashHead
    from paceline.drafters.eagle.eagle3_head import Eagle3Head
    from paceline.drafters.eagle.head import EagleHead
    from paceline.drafters.early_exit.head import ExitHead
    from paceline.training.heads.frozen_layers import HiddenStates

TOKENS = 32_768  # positions that the fit looks at
RIDGE = 1e-3  # relative to the mean square of each input
SCALES = [2.0**power for power in range(-2, 9)]


class Regression:
    """Ridge regression `y = R x`, from sums over positions."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.squares = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.products = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.seen = 0

    def add(self, x: Float[Tensor, "n inputs"], y: Float[Tensor, "n outputs"]) -> bool:
        """True once it has seen enough."""
        self.squares += (x.T @ x).double()
        self.products += (x.T @ y).double()
        self.seen += len(x)
        return self.seen >= TOKENS

    def solve(self) -> Float[Tensor, "outputs inputs"]:
        if not self.seen:
            raise DataError("the samples are too short for this head: there is nothing to learn so far ahead")
        own = self.squares.diagonal()
        damped = self.squares + (RIDGE * own).where(own > 0, 1.0).diag()  # an input that is always 0 says nothing
        solved: Tensor = torch.linalg.solve(damped, self.products)
        return solved.T.float()


@torch.no_grad()
def fit_eagle(head: EagleHead, features: HiddenStates, data: Dataset, samples: Sequence[int]) -> None:
    """Let `fc` guess the next feature from embedding and feature as well as a linear map can; the layers, which add
    nothing yet, learn the rest. Without this the head starts by saying the token again that it has just read.
    """
    assert head.embedding is not None
    size = head.fc.out_features
    found = Regression(2 * size, size, head.fc.weight.device)
    for batch, asked in _learnt(data, samples, head.fc.weight.device, 1):
        given, known = features(batch).float(), ahead(batch.ids, 1, 0)
        read = torch.cat([functional.embedding(known[asked], head.embedding).float(), given[asked]], -1)
        if found.add(read, ahead(given, 1, 0.0)[asked]):
            break
    head.fc.weight.copy_(found.solve())


@torch.no_grad()
def fit_eagle3(head: Eagle3Head, frozen: HiddenStates, data: Dataset, samples: Sequence[int]) -> None:
    """Let `fc` guess the next feature from the states it fuses, and from the token where that is added to them, as well
    as a linear map can, and the final norm give it the size of features; the layers learn the rest.
    """
    size, read = head.fc.out_features, head.fc.in_features
    entries = read if head.token_in is None else read + size
    found, squares = Regression(entries, size, head.fc.weight.device), torch.zeros(())
    for batch, asked in _learnt(data, samples, head.fc.weight.device, 1):
        given = frozen(batch).float()
        follows = ahead(given[..., -size:], 1, 0.0)[asked]
        squares, seen = follows.square().mean(), given[..., :-size]
        entered = head.of_taps(seen[asked])
        if head.token_in is not None:
            token = head.entry_norm(ahead(head.tokens_in(seen, batch.ids), 1, 0.0)[asked].float())
            entered = torch.cat([head.normed(entered), token], -1)
        if found.add(entered, follows):
            break
    fitted = found.solve()
    head.fc.weight.copy_(fitted[:, :read])
    if head.token_in is not None:
        head.token_in.weight.copy_(fitted[:, read:])
    head.norm.weight.fill_(float(squares.sqrt()))


@torch.no_grad()
def fit_dflash(head: DFlashHead, frozen: HiddenStates, data: Dataset, samples: Sequence[int]) -> None:
    """Let `fc` guess the next feature from the states it fuses as well as a linear map can, and the final norm give
    what comes out the size of features; the layers learn the rest.
    """
    size = head.fc.out_features
    found, squares = Regression(head.fc.in_features, size, head.fc.weight.device), torch.zeros(())
    for batch, asked in _learnt(data, samples, head.fc.weight.device, 1):
        given = frozen(batch).float()
        follows = ahead(given[..., -size:], 1, 0.0)[asked]
        squares = follows.square().mean()
        if found.add(given[..., :-size][asked], follows):
            break
    head.fc.weight.copy_(found.solve())
    head.norm.weight.fill_(float(squares.sqrt()))


@torch.no_grad()
def fit_entry(
    head: Eagle3Head,
    before: Eagle3Head,
    taps: Sequence[int],
    frozen: HiddenStates,
    data: Dataset,
    samples: Sequence[int],
) -> None:
    """Let what enters the layers be as like what enters those of another head, trained on other states, as linear maps
    can make it.

    Args:
        taps: what both read, and of the target's hidden states `frozen` gives, before its features.
    """
    size, device = head.fc.out_features, head.fc.weight.device
    fused, token = Regression(head.fc.in_features, size, device), Regression(size, size, device)
    for batch, asked in _learnt(data, samples, device, 1):
        given = frozen(batch).float()
        ours, theirs = (torch.cat([of_tap(given, taps, tap, size) for tap in one.reads], -1) for one in (head, before))
        states = head.of_taps(ours)[asked]
        enough = fused.add(states if head.token_in is None else head.normed(states), before.fused(theirs)[asked])
        if head.token_in is not None and before.token_in is not None:
            came = head.entry_norm(head.tokens_in(ours, batch.ids))[asked]
            token.add(came, before.token_in(before.entry_norm(before.tokens_in(theirs, batch.ids)))[asked])
        if enough:
            break
    head.fc.weight.copy_(fused.solve())
    if head.token_in is not None:
        head.token_in.weight.copy_(token.solve())


@torch.no_grad()
def fit_medusa(head: MedusaHead, features: HiddenStates, data: Dataset, samples: Sequence[int]) -> None:
    """Fold into vocabulary layers of their own the linear map from a feature to the one that is `1 + i` positions on;
    into one that all heads share, the map for the first of them.
    """
    if head.config.vocabulary == OF_TARGET:
        return
    assert head.matrix is not None
    for i, rows in enumerate(head.matrix):
        found = Regression(head.config.hidden, head.config.hidden, rows.device)
        for batch, asked in _learnt(data, samples, rows.device, 1 + i):
            given = features(batch).float()
            if found.add(given[asked], ahead(given, 1 + i, 0.0)[asked]):
                break
        rows.copy_(rows @ found.solve())


@torch.no_grad()
def fit_output(
    head: ExitHead, matrix: Float[Tensor, "all hidden"], frozen: HiddenStates, data: Dataset, samples: Sequence[int]
) -> None:
    """Fold into the head's output matrix the linear map that best takes its states to what follows.

    The layers after the target's N-th do not exist for the head, so that their output matrix W reads another language
    than its states x speak: what starts as a copy agrees with the target hardly ever. Ridge regression gives the map R
    from x to W's row for the target's likeliest token (the next one where that is unknown); W R is the matrix to begin
    with, by the factor that makes its cross-entropy least; or W itself, should that be better.

    Args:
        matrix: W, the target's output matrix, with all its rows.
        samples: of `data`, to fit on.
    """
    size = matrix.shape[1]
    found = Regression(size, size, matrix.device)
    for batch, asked in _learnt(data, samples, matrix.device, 0):
        tokens, _ = soft_labels("argmax", batch.labels[asked], batch.top_ids[asked], batch.top_logp[asked])
        states = head.states(frozen(batch).float())[asked]
        if found.add(states, matrix[tokens[:, 0]].float()):
            break
    folded = found.solve()
    rows = (matrix if head.tokens is None else matrix[head.tokens]).float()
    labels, best, chosen = head.labels(tokens[:, 0]), torch.inf, rows
    for output in (rows, rows @ folded):  # as it is where the head's layers are the target's last
        head.set_output(output)
        logits = head.outputs(states)
        for scale in SCALES:
            if (loss := float(functional.cross_entropy(scale * logits, labels))) < best:
                best, chosen = loss, scale * output
    head.set_output(chosen)


def _learnt(
    data: Dataset, samples: Sequence[int], device: torch.device, by: int
) -> Iterator[tuple[Batch, Bool[Tensor, "batch tokens"]]]:
    """Batches, and where the token after the next `by` ones is to be learnt."""
    for batch in map(data.batch, data.batches(samples, 2048, seed=(0,))):
        batch = batch.to(device)
        yield batch, ahead(batch.labels, by, IGNORE) != IGNORE
