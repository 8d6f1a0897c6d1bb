"""What a user asks for in vLLM: `--additional-config '{"paceline": {"method": "trigram", "mode": "ragged"}}'`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.drafters import DRAFTERS
from paceline.drafting.lookup import DraftSource, MergedLookup
from paceline.drafting.tree_drafter import LookupDrafter
from paceline.errors import OptionError, require
from paceline.policies import POLICIES
from paceline.registry import split_method

if TYPE_CHECKING:
    from paceline.drafting.base import Drafter
    from paceline.policies.base import StoppingPolicy

METHOD = "auto"
RAGGED, PAD, ALL_OR_NOTHING = MODES = ("ragged", "pad", "all-or-nothing")
WORTH = 0.5  # see docs/vllm-drafters.md
OPTIONS: dict[str, Any] = {"method": METHOD, "mode": RAGGED, "worth": WORTH}  # and what they are where not given
MOST_DRAFTED = 32  # tokens a step that a request's own policy may draft, as in `paceline serve`; more where all do
VERSIONS = ("0.32", "0.33")  # of vLLM, whose interface for proposers may change


@dataclass(frozen=True)
class VLLMSettings:
    """How to draft.

    Attributes:
        method: drafter and policy, as everywhere in paceline.
        mode: which shapes a step may have. "ragged": each row as many tokens as pay; "pad": all rows the most as soon
            as one drafts, filled up; "all-or-nothing": all rows the most, where all have as many, or none any.
        most: `num_speculative_tokens`.
        max_model_len: tokens of a context.
        worth: the part of their time that more drafted tokens must bring, as long as a step gains by its drafts. 1: as
            many as make tokens come fastest.
        timed: whether lengths may depend on measured times: not where ranks must draft alike without talking.
    """

    method: str
    mode: str
    most: int
    max_model_len: int
    worth: float = WORTH
    timed: bool = True

    @classmethod
    def of(cls, config: Any) -> VLLMSettings:
        """From a `VllmConfig`. Raises OptionError for what is unknown."""
        additional = config.additional_config or {}
        require(isinstance(additional, dict), "additional_config must be an object, with an object 'paceline' in it")
        given = additional.get("paceline", {})
        require(isinstance(given, dict), "additional_config: paceline must be an object of options")
        unknown = sorted(given.keys() - set(OPTIONS))
        require(
            not unknown,
            f"additional_config: paceline has no option '{', '.join(unknown)}'; there are {', '.join(OPTIONS)}",
        )
        method, mode, worth = (given.get(name, usual) for name, usual in OPTIONS.items())
        require(isinstance(method, str), f"additional_config: method must be a drafter's name, not {method!r}")
        require(mode in MODES, f"additional_config: mode must be one of {', '.join(MODES)}, not '{mode}'")
        number = isinstance(worth, int | float) and not isinstance(worth, bool)
        require(number and 0 <= worth <= 1, f"additional_config: worth must be a number from 0 to 1, not '{worth}'")
        timed = config.parallel_config.distributed_executor_backend != "external_launcher"
        most = config.speculative_config.num_speculative_tokens
        return cls(method, mode, most, config.model_config.max_model_len, worth, timed)


class ProposalSource(NamedTuple):
    """What drafts, and how far.

    Attributes:
        drafter: that `lookup` belongs to, as the method names it.
        auto: whether as many tokens are verified as pay (`budget=auto`), within the policy's limit.
        policy: its name and options.
    """

    drafter: Drafter
    lookup: DraftSource
    auto: bool
    policy: str


def source_of(method: str, owner: Any) -> ProposalSource:
    """The source of a method's drafts.

    Args:
        owner: stands for the target: `name`, `tier`, `tokenizer`, `vocab_size`, `device`; `foreign` and
            `chains_only`, and no `has_blocks`.

    Raises:
        OptionError: the method is unknown, or its drafter needs more than token ids.
    """
    drafter, policy = split_method(method, POLICIES.__contains__)
    spec = DRAFTERS.parse(drafter)
    try:
        made = spec.build(owner)
    except AttributeError as error:  # it looks for a part of a target that `owner` has not
        raise _needs_more(drafter) from error
    lookup = lookup_of(made, drafter)
    lookup.to_chains()
    return ProposalSource(made, lookup, made.auto, policy or made.default_policy)


def lookup_of(drafter: Drafter, name: str) -> DraftSource:
    """What a drafter proposes from. Raises OptionError where that is not token ids alone."""
    kept = getattr(drafter, "shared", None) is not None
    require(not kept, f"'{name}' keeps the texts of requests that ended, and vLLM does not tell when they do")
    if isinstance(drafter, LookupDrafter):
        return drafter.lookup
    if drafter.parts:
        return MergedLookup([lookup_of(part, name) for part in drafter.parts])
    raise _needs_more(name)


def _needs_more(name: str) -> OptionError:
    return OptionError(
        f"'{name}' cannot draft inside vLLM: it needs more than token ids; "
        f"there are trigram, suffix, prompt-lookup, rest, and merge and auto of these"
    )


def new_policy(text: str, remote: bool = False) -> StoppingPolicy:
    """A policy by name and options. Raises OptionError for unknown ones, and for those that no client may set."""
    spec = POLICIES.parse(text)
    if remote:
        spec.check_remote()
    policy: StoppingPolicy = spec.build()
    return policy


def check_version(version: str) -> None:
    """Raises OptionError unless this is a version of vLLM whose interface is known."""
    require(
        version.startswith(tuple(f"{known}." for known in VERSIONS)),
        f"paceline drafts in vLLM {' and '.join(VERSIONS)}, not in {version}",
    )
