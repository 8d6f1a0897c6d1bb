"""REST (He et al., 2023): what followed the longest suffix of the context in a datastore, as a tree."""

from __future__ import annotations

from paceline.drafters.rest.datastore import Datastore, datastore_folder, load_datastore
from paceline.drafters.rest.search import RestLookup
from paceline.drafting.tree_drafter import LookupDrafter
from paceline.errors import require
from paceline.files import at_home
from paceline.registry import AUTO
from paceline.targets.target import Target


class Rest(LookupDrafter):
    """What a datastore has after the longest suffix of the context that it holds.

    Args:
        datastore: folder that `paceline rest build` made, or a loaded `Datastore` (from Python); "auto": the user's own
            for this model (`datastore_folder`).
        longest, shortest: spans of the context that are looked up, the longest first.
        budget: most nodes of the tree (the paper's 64 "draft choices"); "auto": as many as pay on this machine.

    Raises:
        IntegrityError, TokenizerMismatch: the datastore cannot be used.
    """

    default_policy = "fixed:k=6"
    source = "rest"
    files = ("datastore",)

    def __init__(
        self,
        target: Target,
        *,
        datastore: str = AUTO,
        longest: int = 16,
        shortest: int = 2,
        budget: int | str = AUTO,
    ) -> None:
        require(1 <= shortest <= longest, f"rest: need 1 <= shortest <= longest, not {shortest} and {longest}")
        store = datastore if isinstance(datastore, Datastore) else _load(target, datastore)
        super().__init__(target, budget, RestLookup(store, longest, shortest))


def _load(target: Target, datastore: str) -> Datastore:
    path = datastore_folder(target.name) if datastore == AUTO else at_home(datastore)
    require(
        datastore != AUTO or path.exists(),
        "rest: this model has no datastore: make one with 'paceline rest build', or name one with datastore=DIR",
    )
    return load_datastore(path, target.tokenizer, target.vocab_size)
