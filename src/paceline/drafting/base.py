"""What a drafter is, and what it may know of the requests it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from paceline.drafting.budget import Budget, Calibration
from paceline.drafting.tree import TokenTree
from paceline.policies.base import StoppingPolicy
from paceline.targets import store
from paceline.targets.cache import KVCache
from paceline.targets.costs import costs_of
from paceline.targets.identity import model_key
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target


class Constraint(Protocol):
    """What a request's output must match."""

    def refused(self, ids: list[int], tree: TokenTree) -> set[int]:
        """The nodes of a tree that cannot become output after `ids`, whose last token is its root."""
        ...

    def forced(self, ids: list[int], most: int) -> list[int]:
        """What must come after `ids`, as far as there is no choice; at most `most` tokens."""
        ...


class Row(Protocol):
    """A request as a drafter sees it."""

    ids: list[int]  # prompt and output so far; the last is the root of the next tree
    policy: StoppingPolicy
    state: Any  # the drafter's own, per request
    sampling: bool  # False: greedy decoding, where a drafter proposes its argmax
    drafter: str | None  # which of several it asked for, by name
    prediction: Sequence[int]  # tokens that its output is likely to have much of; often none

    @property
    def constraint(self) -> Constraint | None:
        """What its output must match."""
        ...

    @property
    def slot(self) -> int:
        """Its row in the list given to `draft`, and in the cache given to `start`; in the target's own for a drafter
        that `shares_cache`.
        """
        ...

    @property
    def room(self) -> int:
        """Most tokens worth drafting now: depth of the tree."""
        ...

    @property
    def plain(self) -> bool:
        """Greedy decoding of raw logits: an argmax is all it takes."""
        ...

    def distribution(self, logits: Float[Tensor, " vocab"], drafted: list[int]) -> Float[Tensor, " vocab"]:
        """Draft distribution q from the drafter's logits after `drafted`, under the request's own processors."""
        ...

    def draw(self, q: Float[Tensor, " vocab"]) -> int:
        """A token from `q`: its argmax when greedy, else a sample."""
        ...


class Drafter:
    """Proposes a `TokenTree` a round for every running request.

    Options are keyword-only constructor arguments after the target. Per-request state belongs in `row.state`; per-run
    buffers are made in `start`. `rows[i].slot == i` always, and the target's KV cache holds `row.ids[:-1]`.
    """

    #: The policy a user gets who names none.
    default_policy = "fixed"
    #: Hidden states the drafter wants of every committed token (see `Target.forward`).
    taps: tuple[int, ...] = ()
    #: What it calls itself in the statistics.
    source = ""
    #: Width of the hidden states it shows to policies that read them; None: it has none.
    hidden_width: int | None = None
    #: Whether what it drafts depends on what passes cost: these are then measured before the first request.
    reads_costs = False
    #: Whether all nodes of its trees have scores and none is drawn: a merge may then leave out any of them. It gives
    #: the drafter a budget of its own making, as `row.state.budget`.
    competes = False
    #: Whether it learns from branches that a target which reads chains only would leave out.
    needs_trees = False
    #: Whether it looks at the target's logits after a pass: of greedy requests nobody else does, and a tier may find
    #: the likeliest tokens without them.
    reads_logits = False
    #: Whether it runs the target's layers on the target's own cache: its rows are then those of the batch.
    shares_cache = False
    #: Those of its options that name a file or folder, unless they say "auto" or "none".
    files: tuple[str, ...] = ()
    #: The drafters it is made of.
    parts: Sequence[Drafter] = ()
    #: How many requests of the batch others draft for: they share the pass that a budget counts on.
    others = 0
    #: Forwards of its last draft, one more than tokens where a policy left the last token out; None: it runs none.
    forwards: int | None = None
    #: How many requests shared the last pass that it drafted for.
    sharing = 1
    #: Where the trained head lies that it drafts with; None: it has none, or one that was made in Python.
    folder: Path | None = None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.calibration = Calibration()  # what greedy requests have shown of it,
        self.calibration_of_samples = Calibration(self.calibration, tells=False)  # and others, which accept less

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """Those of `taps` that it looks at in prompts as well."""
        return tuple({tap for part in self.parts for tap in part.prompt_taps}) if self.parts else self.taps

    @property
    def kept_taps(self) -> tuple[int, ...]:
        """Those of `prompt_taps` that it wants of all of a prompt. Of a prompt that is long it is given the others of
        some of the last tokens only, and of what is known from another request not at all (`decoding.reading`).
        """
        return tuple({tap for part in self.parts for tap in part.kept_taps}) if self.parts else self.prompt_taps

    def new_budget(self, row: Row) -> Budget:
        """An automatic budget for a request, which starts from what those before it have shown of this drafter."""
        before = self.calibration_of_samples if row.sampling else self.calibration
        return Budget(costs_of(self.target, row.plain), before, self.target.packs, self.target.chains_only)

    @property
    def predictors(self) -> tuple[Path, ...]:
        """Folders where stop predictors trained for it may lie: where training puts them, then what comes with it."""
        trained = store.root() / "stop-predictors" / model_key(self.target) / self.source
        return (trained,) if self.folder is None else (trained, self.folder)

    def drafted_for(self, row: Row, tree: TokenTree) -> Drafter | None:
        """Whose draft alone `tree` is, of the drafters that it asks; None: nobody's."""
        return self

    def max_nodes(self, depth: int) -> int:
        """Most nodes a tree may have, root aside, when policies allow `depth`: sizes the KV cache."""
        return depth

    def start(self, cache: KVCache) -> None:
        """A run begins over this (target) cache; allocate what needs its batch and capacity."""

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        """A request joins: its prompt but the last token is in the cache; `hidden` are the prompt's `taps`."""

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Some of these rows, those with `room`, are about to be drafted for: read what has come since the last time.

        Called where drafting is not asked for every round; `draft` would do it, but what that takes is measured.
        """

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        """One tree a row, no deeper than `row.room` and no longer than the row's policy wants."""
        raise NotImplementedError

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        """Where the verification pass over the drafted trees begins: `start` and `hidden` of `Target.forward`.

        A drafter that has run the target's first layers over the trees, into `cache`, lets the pass go on from there.
        The trees may have nodes of others after its own.
        """
        return 0, None

    def asked_for(self, row: Row, tree: TokenTree, path: list[int]) -> tuple[int, int] | None:
        """What the row's policy is told of a round: how deep it had the row's drafter draft, and how many of these
        tokens were accepted, of the nodes `path`, root first; None: nothing, it was not asked.
        """
        return tree.depth, len(path) - 1

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        """A round's outcome: the accepted nodes, root first. `row.ids` already ends with the target's own token.

        Args:
            out: the target's pass at this tree: logits `[nodes, vocab]`, and the drafter's taps `[nodes, hidden]`.
        """

    def end(self, row: Row) -> None:
        """A request leaves; its row is given to another."""

    def move(self, source: int, target: int) -> None:
        """The request in row `source` moves to row `target`."""
