"""How an exit head starts: from the target's weights, fitted to the text in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.early_exit.head import ExitHead
from paceline.training.dataset import IGNORE, Dataset
from paceline.training.frozen import Frozen
from paceline.training.objectives import soft_labels

TOKENS = 32_768  # positions that the fit looks at
RIDGE = 1e-3  # relative to the mean square of the states
SCALES = [2.0**power for power in range(-2, 9)]


@torch.no_grad()
def fit_output(
    head: ExitHead, matrix: Float[Tensor, "all hidden"], frozen: Frozen, data: Dataset, samples: Sequence[int]
) -> None:
    """Fold into the head's output matrix the linear map that best takes its states to what follows.

    The layers behind the target's N-th do not exist for the head, so that their output matrix W reads another language
    than its states x speak: what starts as a copy agrees with the target hardly ever. Ridge regression gives the map R
    from x to W's row for the target's likeliest token (the next one where that is unknown); W R is the matrix to begin
    with, by the factor that makes its cross-entropy least; or W itself, should that be better.

    Args:
        matrix: W, the target's output matrix, with all its rows.
        samples: of `data`, to fit on.
    """
    size, seen = matrix.shape[1], 0
    device = matrix.device
    squares, products = (torch.zeros(size, size, dtype=torch.float64, device=device) for _ in range(2))
    for batch in map(data.batch, data.batches(samples, 2048, seed=(0,))):
        batch = batch.to(device)
        asked = batch.labels != IGNORE
        tokens, _ = soft_labels("argmax", batch.labels[asked], batch.top_ids[asked], batch.top_logp[asked])
        states = head.states(frozen(batch).float())[asked]
        squares += (states.T @ states).double()
        products += (states.T @ matrix[tokens[:, 0]].float()).double()
        seen += len(states)
        if seen >= TOKENS:
            break
    damped = squares + RIDGE * squares.diagonal().mean() * torch.eye(size, dtype=torch.float64, device=device)
    folded = torch.linalg.solve(damped, products).T.float()
    rows = (matrix if head.tokens is None else matrix[head.tokens]).float()
    labels, best = head.labels(tokens[:, 0]), torch.inf
    for output in (rows, rows @ folded):  # as it is where the head's layers are the target's last
        head.set_output(output)
        logits = head.outputs(states)
        for scale in SCALES:
            if (loss := float(F.cross_entropy(scale * logits, labels))) < best:
                best, chosen = loss, scale * output
    head.set_output(chosen)
