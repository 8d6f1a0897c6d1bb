"""The search for the sublayers a draft may skip (Draft & Verify, Zhang et al., 2023).

As in the paper: Bayesian optimisation with a Gaussian process over one yes or no for each attention and MLP sublayer,
for the least time a token on a few prompts. Unlike there a trial does not decode: its acceptance is replayed in one
pass and its time computed from costs measured once (`skip_cost`), so it is quick, and the same on a busy machine.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from paceline.drafters.layer_skip.skip_set import KINDS, SkipSet
from paceline.errors import OptionError, UnsupportedModel, require
from paceline.targets.identity import model_key
from paceline.training.layer_skip.cost import GreedyReplay, SkipCosts, measure, tau
from paceline.version import __version__

if TYPE_CHECKING:
    from optuna import Study, Trial

    from paceline.targets.target import Target

#: Tried first: sublayers of both kinds, or of one, skipped evenly at these shares.
EVEN = {KINDS: (0.15, 0.2, 0.3, 0.4, 0.5, 0.6), ("attention",): (0.3, 0.6), ("mlp",): (0.2, 0.4)}


class SearchProgress(NamedTuple):
    """After a trial: how many are done, its predicted speedup over plain decoding (marked down when it skips too
    little), and the best so far.
    """

    done: int
    trials: int
    speedup: float
    best: float


def search(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    trials: int = 100,
    new_tokens: int = 32,
    k_max: int = 8,
    min_skip: float = 0.1,
    seed: int = 0,
    costs: SkipCosts | None = None,
    journal: Path | None = None,
    resume: bool = False,
    progress: Callable[[SearchProgress], None] = lambda _: None,
) -> SkipSet:
    """The skip set with the least predicted time a token.

    Args:
        prompts: token ids, chat template applied; a dozen, of the kinds the model will be used for.
        trials: skip sets tried, in all.
        new_tokens: tokens of the target's own continuation of each prompt on which drafts are judged.
        k_max: longest draft considered.
        min_skip: share of a draft pass's time that the set must save. Without it the best set may be nearly empty:
            where no set pays, drafting with the whole model loses least.
        costs: of the passes; default measured now.
        journal: file that keeps the trials; a search that was killed goes on from it with `resume`.
        progress: called after every trial.

    Returns:
        The set; `found` tells how it was found and what it promises: `speedup` below 1 means that no set pays.

    Raises:
        OptionError: no prompts, values out of range, a journal of another search, optuna missing.
        UnsupportedModel: the model's layers cannot be run one by one.
        ContextOverflow: a prompt and its continuation do not fit the context.
    """
    require(trials >= 1, f"layer-skip search: trials must be at least 1, not {trials}")
    require(new_tokens >= 1, f"layer-skip search: new tokens must be at least 1, not {new_tokens}")
    require(k_max >= 1, f"layer-skip search: k_max must be at least 1, not {k_max}")
    most = target.context - 2  # with the token that a draft goes on from and one before it
    require(k_max <= most, f"layer-skip search: k_max must be at most {most} in a context of {target.context} tokens")
    require(0 <= min_skip < 1, f"layer-skip search: min_skip must lie in [0, 1), not {min_skip}")
    require(bool(prompts) and all(prompts), "layer-skip search: there are no prompts, or one is empty")
    if not target.has_blocks:
        raise UnsupportedModel(f"layer-skip needs a model whose layers run one by one; {target.name} is not one")
    for ids in prompts:
        target.check_ids(ids)
        target.check_fits(len(ids), new_tokens)
    about = {
        "model": model_key(target),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps([*map(list, prompts)]).encode()).hexdigest(),
        "new_tokens": new_tokens,
        "k_max": k_max,
        "min_skip": min_skip,
        "seed": seed,
    }
    study = _study(seed, about, target.num_layers, journal, resume)
    if "costs" not in study.user_attrs:
        study.set_user_attr("costs", asdict(costs or measure(target, k_max)))
    known = SkipCosts.of(study.user_attrs["costs"])  # all trials of a journal are judged by the same
    replay = GreedyReplay(target, prompts, new_tokens)

    @cache  # the sampler comes back to sets it thinks well of
    def speedup(skip: SkipSet) -> float:
        return known.speedup(replay.matches(skip.sublayers), known.draft(skip))[0]

    def short(skip: SkipSet) -> float:
        """By how much it falls short of `min_skip`."""
        return max(0.0, min_skip - 1 + known.draft(skip) / known.draft(SkipSet(target.num_layers, (), ())))

    def objective(trial: Trial) -> float:
        skip = _ask(trial, target.num_layers)
        return speedup(skip) - 2 * short(skip)

    def report(study: Study, trial: Any) -> None:
        progress(SearchProgress(_done(study), trials, trial.value, study.best_value))

    if (left := trials - _done(study)) > 0:
        study.optimize(objective, n_trials=left, callbacks=[report])
    tried = [
        (trial.value, _skip_set(trial.params, target.num_layers)) for trial in study.trials if trial.value is not None
    ]
    _, best = max(tried, key=lambda pair: (short(pair[1]) == 0, pair[0]))
    facts = {"method": "search", **about, "trials": _done(study), **_promise(best, replay, known)}
    return replace(best, found=facts | {"costs": asdict(known), "tier": target.tier} | _made())


def _promise(skip: SkipSet, replay: GreedyReplay, costs: SkipCosts) -> dict[str, Any]:
    matches, draft = replay.matches(skip.sublayers), costs.draft(skip)
    speedup, k = costs.speedup(matches, draft)
    return {
        "acceptance": round(float(np.concatenate(matches).mean()), 4),
        "k": k,
        "tau": round(tau(matches, k), 4),
        "draft_cost": round(draft / costs.verify[0], 4),  # of a plain decoding step
        "speedup": round(speedup, 4),
    }


def _made() -> dict[str, Any]:
    threads = torch.get_num_threads()
    return {"threads": threads, "date": datetime.now(UTC).date().isoformat(), "paceline": __version__}


# -- the study -------------------------------------------------------------------------------------------------------
def _study(seed: int, about: dict[str, Any], layers: int, journal: Path | None, resume: bool) -> Study:
    """A new study with the even sets waiting to be tried, or the journal's."""
    try:
        import optuna  # of the extra `train`
        import scipy  # noqa: F401 - the sampler asks for it only after its first trials
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise OptionError("layer-skip search needs optuna and scipy: pip install 'paceline[train]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
    storage = None
    try:
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            if not resume:
                journal.unlink(missing_ok=True)
            storage = JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.create_study(
            storage=storage, sampler=sampler, study_name="layer-skip", direction="maximize", load_if_exists=True
        )
    except (ValueError, KeyError) as error:
        raise OptionError(f"layer-skip search: {journal} is damaged or no journal of a search: start anew") from error
    except OSError as error:
        raise OptionError(f"layer-skip search: cannot write {journal}: {error.strerror}") from error
    known = study.user_attrs.get("about", about)
    differing = [name for name in about if known.get(name) != about[name]]
    require(not differing, f"layer-skip search: {journal} is of a search with other {', '.join(differing)}")
    if "about" not in study.user_attrs:
        study.set_user_attr("about", about)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # a search was killed while it ran
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.WAITING)
    tried = [trial.params or trial.system_attrs.get("fixed_params") for trial in study.get_trials(states=states)]
    for kinds, shares in EVEN.items():
        for share in shares:
            if (even := _params(SkipSet.even(layers, share), kinds)) not in tried:
                study.enqueue_trial(even)
    return study


def _done(study: Study) -> int:
    return sum(trial.value is not None for trial in study.trials)


# -- skip sets as parameters -----------------------------------------------------------------------------------------
def _ask(trial: Trial, layers: int) -> SkipSet:
    chosen = {f"{kind}.{n}": trial.suggest_int(f"{kind}.{n}", 0, 1) for kind in KINDS for n in range(layers)}
    return _skip_set(chosen, layers)


def _skip_set(params: dict[str, int], layers: int) -> SkipSet:
    attention, mlp = (tuple(n for n in range(layers) if params[f"{kind}.{n}"]) for kind in KINDS)
    return SkipSet(layers, attention, mlp)


def _params(skip: SkipSet, kinds: Sequence[str]) -> dict[str, int]:
    return {
        f"{kind}.{n}": int(kind in kinds and n in getattr(skip, kind)) for kind in KINDS for n in range(skip.layers)
    }
