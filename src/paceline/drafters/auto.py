"""`auto`: every source of drafts that a model has, each asked where it pays on this machine and in this text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.drafters.dflash.drafter import DFlash
from paceline.drafters.dflash.formats import is_dflash
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.medusa.drafter import Medusa
from paceline.drafters.merge import Merge
from paceline.drafters.mtp.drafter import Mtp
from paceline.drafters.mtp.layers import has_mtp_layer
from paceline.drafters.recycling import Recycling
from paceline.drafters.rest.datastore import datastore_folder
from paceline.drafters.suffix import Suffix
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafting.base import Drafter
from paceline.drafting.shared_texts import PROCESS, REQUEST
from paceline.errors import PacelineError
from paceline.files import at_home
from paceline.registry import AUTO
from paceline.targets.target import Target

NONE = "none"

log = logging.getLogger("paceline")


class Auto(Merge):
    """What the context repeats, n-grams of text and context, the user's datastore where there is one, and what is
    trained for the model: the guide of its n-grams, or else the best head that is installed.

    One rule decides everything: each round, spend time where it buys tokens fastest. A source is asked only where what
    it adds has been worth its time (`drafting.gate`), and as many of all candidates are verified as pay
    (`drafting.budget`): none at all where none pays, which is plain decoding.

    Args:
        parts: the sources (from Python), in place of those that the model has.
        head: a trained head as for `eagle`, `dflash` or `medusa`; "auto": where there is no guide, the first that fits
            the model, in this order, or else the layer that it was published with (`mtp`); "none": do without.
        guide: as for `trigram`.
        share: "process": as for `suffix`, and `recycling` is one of the sources, with a memory of all requests.
        budget: most nodes that are verified; a number asks all sources every round, so that a seed's own sample does
            not depend on measured times.
    """

    source = "auto"
    files = ("head", "guide")

    def __init__(
        self,
        target: Target,
        parts: Sequence[Drafter] = (),
        *,
        head: str = AUTO,
        guide: str = AUTO,
        share: str = REQUEST,
        budget: int | str = AUTO,
    ) -> None:
        made = parts or sources(target, head, guide, share)
        super().__init__(target, drafters=made, budget=budget)  # type: ignore[arg-type]


def sources(target: Target, head: str, guide: str, share: str) -> list[Drafter]:
    """All that a model has, for these options of `Auto`."""
    trigram = Trigram(target, guide=guide)
    # Beside a guide heads brought nothing (docs/benchmarks-auto.md), and in another engine they cannot run.
    without = head == NONE or (head == AUTO and (trigram.guided or target.foreign))
    trained = None if without else trained_head(target, head)
    recycling = [Recycling(target, share=share)] if share == PROCESS else []
    free = [trigram, Suffix(target, share=share), *recycling, *datastore(target)]
    return [*free, *([trained] if trained else [])]


def datastore(target: Target) -> list[Drafter]:
    """What drafts from the user's datastore for this model, if there is one that fits."""
    if not datastore_folder(target.name).is_dir():
        return []
    from paceline.drafters.rest.drafter import Rest  # numba takes a second to import

    try:
        return [Rest(target)]
    except PacelineError as error:
        log.warning("auto: %s", error)
        return []


def trained_head(target: Target, head: str = AUTO) -> Drafter | None:
    """A drafter of trees with a trained head; None where "auto" finds none.

    Raises:
        PacelineError: the head that is named is not there, or does not fit.
    """
    refused: PacelineError | None = None
    named = head not in (AUTO, NONE) and is_dflash(at_home(head))  # else EAGLE's reader would say what it lacks
    makers = [_dflash] if named else [_eagle, _dflash, _medusa]
    # It runs on the reference tier only; others would read the model's whole configuration to tell.
    if head == AUTO and target.tier == "reference" and has_mtp_layer(target):
        makers.append(_mtp)
    for make in makers:
        try:
            return make(target, head)
        except PacelineError as error:
            refused = refused or error
    if head != AUTO and refused:
        raise refused
    return None


def _eagle(target: Target, head: str) -> Drafter:
    return Eagle(target, head=head, tree=3, budget=12)


def _dflash(target: Target, head: str) -> Drafter:
    return DFlash(target, head=head, tree="dynamic", budget=12)


def _medusa(target: Target, head: str) -> Drafter:
    return Medusa(target, head=head, tree="dynamic", budget=12)


def _mtp(target: Target, head: str) -> Drafter:
    return Mtp(target, head=head, tree=2 if target.chains_only else 3, budget=12)
