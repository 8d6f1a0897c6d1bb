"""`share=`: an option of all drafters with a memory that requests could share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.drafters import DRAFTERS
from paceline.drafting.shared_texts import REQUEST
from paceline.errors import OptionError, require
from paceline.policies import POLICIES
from paceline.registry import split_method

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter
    from paceline.targets.target import Target


def shared(drafter: str | Callable[[Target], Drafter], share: str) -> str | Callable[[Target], Drafter]:
    """The drafter with the option `share`, unless that is the usual one. With "process" the speed of one request tells
    about the text of others.

    Raises:
        OptionError: it has no memory to share, or is none that is named.
    """
    if share == REQUEST:
        return drafter
    if not isinstance(drafter, str):
        raise OptionError("share is for drafters that are named")
    name, policy = split_method(drafter, POLICIES.__contains__)
    kind = name.partition(":")[0]
    require("share" in DRAFTERS.options(kind), f"{kind} has no memory that requests could share")
    return f"{name}:share={share}" + (f"+{policy}" if policy else "")
