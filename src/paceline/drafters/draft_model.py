"""Vanilla speculative decoding (Leviathan et al., 2023): a smaller model drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from jaxtyping import Bool

from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Row
from paceline.drafting.translation import MOST, DraftText, TranslatedText, Translation
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.registry import AUTO
from paceline.targets.cache import KVCache
from paceline.targets.identity import model_key
from paceline.targets.span import Span
from paceline.targets.target import PREFILL_CHUNK, Target
from paceline.targets.tokenizers import require_tokenizer, same_tokenizer

LONGER = 1.5  # tokens that a text may take for each one of the target's; if it takes more it is decoded plainly
DRAFT = 18  # tokens of the target that there is room for besides: of a draft, and those before it

log = logging.getLogger("paceline")


class DraftModel(AutoregressiveDrafter):
    """A smaller model drafts, on a cache of its own. Where its tokenizer is not the target's it proposes tokens that
    both have (see `Translation`).

    Args:
        model: name, folder or hub id of the draft model, or a loaded `Target` of it (from Python).
        copy: whether it copies from the request's text where that repeats itself (see `Copies`); "auto": under
            policies that say so, as `pace` does.

    Raises:
        TokenizerMismatch: one of the two has no tokenizer, or their tokens cannot be compared.
    """

    default_policy = "pace"
    source = "draft-model"

    def __init__(self, target: Target, *, model: str = "", copy: bool | str = AUTO) -> None:
        super().__init__(target, copy=copy)
        require(bool(model), "draft-model: say which model drafts, as in draft-model:model=NAME")
        self.drafter = model if isinstance(model, Target) else _load(model, target)
        require(
            self.drafter.takes_back,
            f"draft-model: from what {self.drafter.name} keeps of a text no rejected token can be taken back",
        )
        self.translation = _translation(target, self.drafter)
        if self.translation:
            self.tokens = torch.tensor(self.translation.tokens, device=target.device)
            self._columns = torch.tensor(self.translation.columns, device=self.drafter.device)
        elif self.drafter.vocab_size < target.vocab_size:  # output matrices may be padded differently
            self.tokens = torch.arange(self.drafter.vocab_size, device=target.device)
        self.hidden_width = self.drafter.config.hidden_size if self.drafter.has_blocks else None
        self.cache: KVCache
        self._reads: Bool[np.ndarray, " batch"]  # rows whose last token this depth's forward reads for good

    @property
    def predictors(self) -> tuple[Path, ...]:
        return tuple(folder / model_key(self.drafter) for folder in super().predictors)

    def start(self, cache: KVCache) -> None:
        capacity = int(cache.capacity * LONGER) + DRAFT * MOST if self.translation else cache.capacity
        self.cache = self.drafter.new_cache(cache.batch, capacity)

    def begin(self, row: Row, hidden: object) -> None:
        row.state = TranslatedText(row.ids, self.translation) if self.translation else DraftText(row.ids)
        self.cache.reserve((row.policy.limit + 2) * row.state.most)  # what a round's draft adds is taken back
        self.cache.lengths[row.slot] = 0
        if self.cache.batch == 1 and self.fits(row):  # nobody else waits
            self._catch_up(row)

    def fits(self, row: Row) -> bool:
        """Whether there is room for the text, which may take more tokens of the draft model, and for a draft."""
        text: DraftText = row.state
        drafted = (min(row.room, row.policy.limit) + 2) * text.most
        return len(text.ids) + drafted <= min(self.cache.capacity, self.drafter.context)

    def behind(self, row: Row) -> bool:
        """Whether more than a chunk of a long prompt is still to be read."""
        return self._early(row) - int(self.cache.lengths[row.slot]) > PREFILL_CHUNK

    def ready(self, row: Row) -> bool:
        """A long prompt is read a chunk a round, as the target does; until then its request is decoded plainly."""
        if not self.fits(row):
            return False
        if not self.behind(row):
            return True
        own = self.cache.rows(row.slot, row.slot + 1)
        start = int(own.lengths[0])
        self._read(row.state.ids[start : start + PREFILL_CHUNK], own)
        return False

    def _catch_up(self, row: Row) -> None:
        own = self.cache.rows(row.slot, row.slot + 1)
        self._read(row.state.ids[own.lengths[0] : self._early(row)], own)

    def _early(self, row: Row) -> int:
        """How many tokens all but the target's last two are: the two are read with the next draft."""
        text: DraftText = row.state
        return text.place(max(len(row.ids) - 2, 0))

    def _read(self, tokens: list[int], own: KVCache) -> None:
        self.drafter.prefill([min(token, self.drafter.vocab_size - 1) for token in tokens], own)

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        cache = self.cache.rows(0, len(rows))
        waiting = [self.behind(row) or not self.fits(row) for row in rows]
        if depth == 0:
            self._reads = np.logical_not(waiting)
            for row in rows:
                if not waiting[row.slot]:
                    self._catch_up(row)
        else:  # a row that stopped, or went on with copies, is out for the round, however far the others come
            self._reads &= [len(tree) == depth + 1 for tree in trees]
        # What the draft model has not seen: its own last token, and before the first also what the target added.
        news = [
            row.state.of(tree.tokens[-1]) if depth or waiting[row.slot] else row.state.ids[cache.lengths[row.slot] :]
            for row, tree in zip(rows, trees, strict=True)
        ]
        width = max(map(len, news))
        ids = torch.tensor([new + new[-1:] * (width - len(new)) for new in news], device=self.drafter.device)
        ids.clamp_(max=self.drafter.vocab_size - 1)  # that of the target may have more
        wanted = self.hidden_width and any(row.policy.reads_hidden for row in rows)
        last = self.drafter.num_layers
        out = self.drafter.forward(Span(ids, cache.lengths.copy()), cache, (last,) if wanted else ())
        counts = np.array([len(new) for new in news])
        cache.lengths += np.where(self._reads, counts, 0)
        newest = range(len(rows)), counts - 1
        hidden = out.taps[last][newest] if wanted else None
        logits = out.logits[newest]
        both = logits.index_select(-1, self._columns) if self.translation else logits[..., : self.target.vocab_size]
        return Step(both, hidden)

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: object) -> None:
        # Of what the draft model has cached, the tokens before the first that is not its own are right: the target's
        # own one, or what another drafter proposed, whose nodes come after those of this draft.
        own = next((at for at, node in enumerate(path) if node != at), len(path))
        row.state.read(row.ids)
        right = row.state.place(max(len(row.ids) - 1 - len(path) + own, 0))
        self.cache.lengths[row.slot] = min(self.cache.lengths[row.slot], right)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)


def _translation(target: Target, drafter: Target) -> Translation | None:
    """Between two models with different tokenizers. Targets made in Python may both go without."""
    if target.tokenizer is None and drafter.tokenizer is None:
        return None
    ours, other = (require_tokenizer(model.tokenizer, DraftModel.source) for model in (target, drafter))
    if same_tokenizer(ours, other):
        return None
    found = Translation(ours, other, (target.vocab_size, drafter.vocab_size))
    log.warning(
        "draft-model: %s has another tokenizer: it can draft %d of the target's %d tokens",
        drafter.name,
        len(found.tokens),
        len(ours),
    )
    return found


#: Draft models in use, so that several methods of one process share their weights.
_loaded: WeakValueDictionary[tuple[object, ...], Target] = WeakValueDictionary()


def _load(name: str, target: Target) -> Target:
    from paceline.targets import load_target  # loading pulls in transformers' auto classes

    key = (name, target.model_dtype, target.device)
    if (found := _loaded.get(key)) is None:
        found = _loaded[key] = load_target(name, dtype=target.model_dtype, device=target.device)
    return found
