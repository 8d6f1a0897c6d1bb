"""What every drafter gives under every policy and verifier: plain decoding's output. A drafter or policy that is
registered is tested here; one that needs options gets them in `OPTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import mtp_models
import paceline
import predictor_files
from drafters.test_dflash import noisy as dflash_head
from drafters.test_eagle3 import noisy as eagle3_head
from drafters.test_eagle_head import noisy as eagle_head
from helpers import Oracle, hf_greedy, one_thread, perturbed, small_neox  # noqa: F401
from paceline import DRAFTERS, LLM, POLICIES
from paceline.decoding.request import VERIFIERS
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafters.rest.datastore import build as build_datastore
from paceline.drafting.pause import Pause
from paceline.errors import OptionError
from paceline.profiling import rounds
from paceline.registry import Spec
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from tiny import LETTERS, byte_tokenizer, pair_tokenizer, small_llama, with_tokens

MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": small_llama, "gpt_neox": small_neox}

#: Options of drafters that cannot do without, or would not draft; the folder is that of a draft model that is right now
#: and then.
OPTIONS: dict[str, Callable[[Path], str]] = {
    "draft-model": lambda folder: f":model={folder}",
    "early-exit": lambda folder: f":head={folder / 'exit'}",
    "medusa": lambda folder: f":head={folder / 'medusa'}",
    "eagle": lambda folder: f":head={folder / 'eagle'}",
    "dflash": lambda folder: f":head={folder / 'dflash'}",
    "mtp": lambda folder: f":head={folder / 'mtp'}",
    "rest": lambda folder: f":datastore={datastore(folder / 'rest')}",
    "auto": lambda _: ":budget=8",  # a seed's sample under rejection is its own with fixed budgets only
    "lookahead": lambda _: ":budget=16",  # as many as pay would be none
    "merge": lambda folder: f":drafters=draft-model;model={folder}|suffix|trigram|lookahead;level=3;budget=8:budget=8",
}

#: Of these, drafters that come with all they need for the default model.
SHIPPED = ("early-exit", "medusa", "eagle", "lookahead")

#: A drafter with another kind of head; drafters that copy repeated text; and drafters that work on the target's own
#: cache, merged with others and with one another.
MERGES: dict[str, Callable[[Path], str]] = {
    "eagle of EAGLE-3": lambda folder: f"eagle:head={folder / 'eagle3'}:extra=9",
    "draft-model that copies": lambda folder: f"draft-model:model={folder}:copy=1",
    "draft-model of another tokenizer": lambda folder: f"draft-model:model={folder / 'other'}",
    "early-exit that copies": lambda folder: f"early-exit:head={folder / 'exit'}:copy=1",
    "eagle that copies": lambda folder: f"eagle:head={folder / 'eagle'}:copy=1",
    "layer-skip that copies": lambda _: "layer-skip:copy=1",
    "medusa that copies": lambda folder: f"medusa:head={folder / 'medusa'}:copy=1",
    "dflash that copies": lambda folder: f"dflash:head={folder / 'dflash'}:copy=1",
    "dflash in a tree": lambda folder: f"dflash:head={folder / 'dflash'}:tree=dynamic:budget=8",
    "merge of dflash": lambda folder: f"merge:drafters=suffix|dflash;head={folder / 'dflash'}:budget=8",
    "merge of early-exit": lambda folder: f"merge:drafters=early-exit;head={folder / 'exit'}|suffix:budget=8",
    "merge of layer-skip": lambda folder: "merge:drafters=suffix|layer-skip:budget=8",
    "merge of both": lambda folder: f"merge:drafters=early-exit;head={folder / 'exit'}|layer-skip:budget=8",
    "merge of a tree": lambda folder: f"merge:drafters=layer-skip|early-exit;head={folder / 'exit'};tree=2:budget=8",
}


def datastore(folder: Path) -> Path:
    (folder / "corpus").mkdir(parents=True)
    (folder / "corpus" / "text").write_bytes(bytes(range(1, 128)) * 3 + bytes([1, 2, 3, 4, 5, 6, 7]) * 9)
    build_datastore(byte_tokenizer(), [folder / "corpus" / "text"], folder)
    return folder


#: Policies that cannot do without a predictor get one that says now this, now that.
TRAINED = ("specdec++", "disco")
#: Policies that would hardly ever draft with models that are never sure.
SHY = ("adaedl", "max-confidence")
#: Drafters that show hidden states, and policies that look at them: the others refuse these.
SHOW_HIDDEN = ("draft-model", "layer-skip", "early-exit", "medusa", "eagle", "dflash", "mtp")
READ_HIDDEN = ("specdec++",)

RUNS = [
    (drafter, policy)
    for drafter in DRAFTERS
    for policy in POLICIES
    if drafter in SHOW_HIDDEN or policy not in READ_HIDDEN
]

MERGED = ("fixed", "beta-ts")  # policies are enough for these
RUNS += [(drafter, policy) for drafter in MERGES for policy in MERGED]
RUNS += [("early-exit that copies", policy) for policy in ("adaedl", "max-confidence", "cali-ts", "specdec++", "disco")]
RUNS += [("draft-model of another tokenizer", policy) for policy in ("pace", "adaedl", "specdec++")]
RUNS += [("eagle of EAGLE-3", policy) for policy in ("pace", "adaedl", "cali-ts", "specdec++")]

#: Prompts of different lengths; repetition gives n-gram drafters something to copy.
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100], [1, 2, 3, 4] * 9, [42, 43]]
NEW = 16


SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 3, "max_new_tokens": 10}


class World:
    """A target with everything that is compared against it; drafters are made once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.model, self.folder = name, MODELS[name](), folder
        self.truths = {tuple(prompt): hf_greedy(self.model, prompt, NEW) for prompt in PROMPTS}
        draft = perturbed(MODELS[name](), noise=0.05)
        draft.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        pairs = [(LETTERS[5], LETTERS[6]), (LETTERS[1], LETTERS[2])]
        letters = [*range(239, 9, -1), *range(9)]
        with_tokens(draft, [*letters, 6, 2, 256]).save_pretrained(folder / "other")
        pair_tokenizer([LETTERS[at] for at in letters], pairs, "</s>").save_pretrained(folder / "other")
        head = ExitHead.from_target(self.model, 1, exit_layers=2, tokens=range(240))
        perturbed(head, noise=0.05).save(folder / "exit")
        medusa = MedusaHead.from_target(self.model, heads=3, layers=2, tokens=range(240))
        perturbed(medusa, noise=0.05).save(folder / "medusa")
        eagle_head(self.model, 2, tokens=range(240)).save(folder / "eagle")
        eagle3_head(self.model, 2, tokens=range(240)).save(folder / "eagle3")
        dflash_head(self.model, tokens=range(240)).save(folder / "dflash")
        if self.runs("mtp"):
            mtp_models.save_random_layer(self.model, folder / "mtp")
        self.predictors = predictor_files.write(folder)
        self.plain = paceline.load(self.model, drafter="none", tokenizer=byte_tokenizer())
        self.made: dict[str, LLM] = {}

    @property
    def truth(self) -> list[list[int]]:
        return list(self.truths.values())

    @cached_property
    def sample(self) -> list[list[int]]:
        """What plain decoding samples."""
        return ids(self.plain, **SAMPLING)

    @cache  # noqa: B019  (as many worlds as models)
    def generated(self, eos: int | tuple[int, ...], **options: float) -> list[list[int]]:
        """What transformers' own greedy `generate` says, with these options."""
        ends = list(eos) if isinstance(eos, tuple) else eos
        return [hf_greedy(self.model, prompt, NEW, eos_token_id=ends, **options) for prompt in PROMPTS]

    def runs(self, drafter: str) -> bool:
        """MTP layers have RMS norms, and transformers knows them since 5.23 only."""
        return drafter != "mtp" or (self.name == "llama" and mtp_models.MtpModel is not None)

    def llm(self, drafter: str, policy: str | None = None, verifier: str = "auto") -> LLM:
        if not self.runs(drafter):
            pytest.skip("this model has no MTP layers")
        if drafter not in self.made:
            name = MERGES.get(drafter, lambda _: drafter + OPTIONS.get(drafter, lambda _: "")(self.folder))(self.folder)
            self.made[drafter] = self.plain.method(name)
        made = self.made[drafter]
        rule = self.rule(policy or type(made.drafter).default_policy)
        return LLM(self.plain.target, made.drafter, rule, verifier)

    def rule(self, policy: str) -> Spec:
        eager = f"{policy}:threshold=0" if policy in SHY else policy
        return POLICIES.parse(self.predictors[policy] if policy in TRAINED else eager)

    def oracle(self, truths: dict[tuple[int, ...], list[int]] | None = None, policy: str = "fixed:k=4") -> LLM:
        return self.plain.method(lambda target: Oracle(target, truths or self.truths), self.rule(policy).text)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """By model, each made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PACELINE_CACHE", str(tmp_path_factory.mktemp("cache"))
        )  # nothing found or trained on this machine
        yield cache(lambda name: World(name, tmp_path_factory.mktemp("draft")))


@pytest.fixture(params=list(MODELS))
def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    return worlds(request.param)


#: A policy does not know which model it drafts for: the second one goes with those that need no more than its drafter.
PAIRS = [
    (model, drafter, policy)
    for model in MODELS
    for drafter, policy in RUNS
    if model == "llama" or policy in (*MERGED, *READ_HIDDEN)
]
#: One drafter of each kind: for what a policy does in the same way whatever drafts, and a drafter whatever stops it.
KINDS = ("draft-model", "eagle", "trigram", "merge")
every_run = pytest.mark.parametrize(("world", "drafter", "policy"), PAIRS, indirect=["world"])
some_runs = pytest.mark.parametrize(
    ("world", "drafter", "policy"),
    [(model, drafter, policy) for model, drafter, policy in PAIRS if policy in MERGED or drafter in KINDS],
    indirect=["world"],
)


def ids(llm: LLM, batch: int | None = 3, prompts: list[list[int]] = PROMPTS, **sampling: object) -> list[list[int]]:
    sampling = {"max_new_tokens": NEW, "eos": (), **sampling}
    return [output.tokens for output in llm.generate(prompts, batch=batch, **sampling)]


def test_plain_decoding_is_transformers(world: World) -> None:
    assert ids(world.plain) == world.truth
    assert ids(world.plain, batch=1) == world.truth


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_greedy_batch(world: World, drafter: str, verifier: str) -> None:
    """Ragged prompts, fewer rows than requests, whatever verifies sampled output: as each prompt alone."""
    assert ids(world.llm(drafter, "fixed:k=4", verifier)) == world.truth


@every_run
def test_greedy_batch_under_every_policy(world: World, drafter: str, policy: str) -> None:
    outputs = world.llm(drafter, policy).generate(PROMPTS, batch=3, eos=(), max_new_tokens=NEW)
    assert [output.tokens for output in outputs] == world.truth
    drafts = drafter != "none" and (drafter, policy) != ("lookahead", "disco")  # the random predictor stops it always
    if policy != "pace":  # which keeps nothing of a head that is never sure
        assert (sum(output.stats.drafted for output in outputs) > 0) == drafts


@some_runs
def test_greedy_alone(world: World, drafter: str, policy: str) -> None:
    for prompt, truth in list(world.truths.items())[1:3]:
        assert ids(world.llm(drafter, policy), prompts=[list(prompt)]) == [truth]


@some_runs
def test_match_gives_the_seeds_own_sample(world: World, drafter: str, policy: str) -> None:
    """Sample-match draws by output position: a seed gives the same tokens whatever drafts."""
    assert ids(world.llm(drafter, policy, "match"), **SAMPLING) == world.sample


@some_runs
def test_sampling_ends_and_repeats(world: World, drafter: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, record and reproducibility; the distribution is tested in decoding/test_losslessness.py."""
    llm = world.llm(drafter, policy, "rejection")
    # Under rejection tokens depend on where drafts end, so on measured costs, on pauses, and on earlier requests.
    monkeypatch.setattr(Pause, "pauses", lambda *_: False)
    for costly in (llm.target, llm.drafter):
        set_costs(costly, Costs({1: 1e-3, 16: 1.001e-3}))
    monkeypatch.setattr(rounds, "_before", {})
    outputs = llm.generate(PROMPTS, batch=3, eos=(), temperature=0.7, seed=1, max_new_tokens=8)
    for output in outputs:
        assert len(output.tokens) == output.stats.tokens == sum(r.emitted for r in output.stats.rounds) == 8
        assert output.finish_reason == "length"
        assert sum(source != "target" for source in output.stats.sources) == output.stats.accepted
    monkeypatch.setattr(rounds, "_before", {})
    again = llm.generate(PROMPTS, batch=3, eos=(), temperature=0.7, seed=1, max_new_tokens=8)
    assert [output.tokens for output in again] == [output.tokens for output in outputs]


@pytest.mark.parametrize("drafter", [drafter for drafter in DRAFTERS if drafter in SHOW_HIDDEN])
def test_a_predictor_of_hidden_states(world: World, drafter: str) -> None:
    """Cali-TS's full form looks at the target's hidden states and the drafter's."""
    made = world.llm(drafter)
    llm = LLM(world.plain.target, made.drafter, POLICIES.parse(world.predictors["cali-ts"]))
    assert ids(llm) == world.truth
    assert [ids(llm, prompts=[prompt])[0] for prompt in PROMPTS] == world.truth


@pytest.mark.parametrize("policy", READ_HIDDEN)
@pytest.mark.parametrize("drafter", [drafter for drafter in DRAFTERS if drafter not in SHOW_HIDDEN])
def test_hidden_states_that_nobody_shows(world: World, drafter: str, policy: str) -> None:
    with pytest.raises(OptionError, match="none to show"):
        ids(world.llm(drafter, policy))


@pytest.mark.parametrize("drafter", [*DRAFTERS, *MERGES])
def test_no_draft(world: World, drafter: str) -> None:
    """k = 0 is plain decoding, and so is a request that has room for one token only."""
    for policy, new in (("fixed:k=0", NEW), (None, 1)):
        outputs = world.llm(drafter, policy).generate(PROMPTS, batch=3, eos=(), max_new_tokens=new)
        for output, truth in zip(outputs, world.truth, strict=True):
            assert output.tokens == truth[:new]
            assert output.stats.drafted == 0
            assert len(output.stats.rounds) == new


@pytest.mark.parametrize("drafter", [*DRAFTERS, *MERGES])
def test_never_drafts_beyond_its_room(world: World, drafter: str) -> None:
    for new in (2, 3, 5):
        outputs = world.llm(drafter, "fixed:k=4").generate(PROMPTS, batch=3, eos=(), max_new_tokens=new)
        for output, truth in zip(outputs, world.truth, strict=True):
            assert output.tokens == truth[:new]
            done = 0
            for record in output.stats.rounds:
                assert record.depth <= min(4, new - done - 1)
                done += record.emitted


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_stops_and_processors(world: World, drafter: str) -> None:
    check_eos(world, world.llm(drafter, "fixed:k=4"))
    check_stop_strings(world, world.llm(drafter, "fixed:k=4"))
    check_processors(world, world.llm(drafter, "fixed:k=4"))


# -- drafts whose acceptance is anything but trivial ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [*(policy for policy in POLICIES if policy not in READ_HIDDEN), "fixed:k=9"])
def test_oracle(world: World, policy: str) -> None:
    """Chains and trees, true, half true and false, in one batch and alone."""
    llm = world.oracle(policy=policy)
    for batch in (3, 1):
        outputs = llm.generate(PROMPTS, batch=batch, eos=(), max_new_tokens=NEW)
        assert [output.tokens for output in outputs] == world.truth
    assert sum(output.stats.accepted for output in outputs) > NEW  # the truths were taken


def test_oracle_stops_and_processors(world: World) -> None:
    """With drafts of k = 9 that know the truth, stops and limits come in the midst of a draft."""
    check_eos(world, world.oracle(policy="fixed:k=9"))
    check_stop_strings(world, world.oracle(policy="fixed:k=9"))
    check_processors(world, world.plain, oracle=world.oracle)
    truthful = world.plain.method(lambda target: Oracle(target, world.truths, ["truth"]), "fixed:k=9")
    for new in (1, 2, 5, 10, 11, 12):
        assert ids(truthful, max_new_tokens=new) == [truth[:new] for truth in world.truth]
    for eos in {truth[4] for truth in world.truth}:
        for output, truth in zip(truthful.generate(PROMPTS, eos=(eos,), max_new_tokens=NEW), world.truth, strict=True):
            assert output.tokens == truth[: truth.index(eos) + 1 if eos in truth else NEW]
            assert output.finish_reason == ("eos" if eos in truth else "length")
            assert output.stats.accepted <= output.stats.tokens  # what was drafted behind the stop does not count


def test_oracle_under_sample_match(world: World) -> None:
    sampling = {"temperature": 0.9, "top_k": 40, "seed": 11}
    plain = ids(world.plain, **sampling)
    told = dict(zip(world.truths, plain, strict=True))
    assert ids(world.oracle(told), **sampling) == plain
    llm = world.oracle(told)
    llm.verifier = "match"
    assert ids(llm, batch=1, **sampling)[:1] == plain[:1]


# -- what is asked of each ----------------------------------------------------------------------------------------


def check_eos(world: World, llm: LLM) -> None:
    """The token ends the output wherever in a draft it stands, as in transformers."""
    for eos in ({truth[5] for truth in world.truth[:2]}, {truth[2] for truth in world.truth}):
        ends = tuple(sorted(eos))
        assert ids(llm, eos=ends) == world.generated(ends)


def check_stop_strings(world: World, llm: LLM) -> None:
    """The text ends before the string, the tokens with the one that completes it."""
    tokenizer = world.plain.tokenizer
    texts = [tokenizer.decode(truth) for truth in world.truth]
    stops = [next(char for char in text[2:] if char != "\ufffd") for text in texts[:2]]
    for stop in ((stops[0],), (stops[1], "never said"), (texts[0][3:6].strip("\ufffd") or stops[0],)):
        outputs = llm.generate(PROMPTS, batch=3, eos=(), stop=stop, max_new_tokens=NEW)
        for output, truth in zip(outputs, world.truth, strict=True):
            prefixes = [tokenizer.decode(truth[: n + 1]) for n in range(NEW)]
            hits = [n for n, text in enumerate(prefixes) if any(string in text for string in stop)]
            assert output.tokens == (truth[: hits[0] + 1] if hits else truth)
            assert output.finish_reason == ("stop" if hits else "length")
            text = prefixes[hits[0] if hits else -1]
            assert output.text == text[: min((text.find(s) for s in stop if s in text), default=None)]


def check_processors(world: World, llm: LLM, oracle: Callable[..., LLM] | None = None) -> None:
    """Greedy with history-dependent processors, against transformers' generate with the same settings. With `oracle`,
    the drafts come from one that knows the processed continuation."""
    eos = world.truth[0][3]
    for options in (
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    ):
        want = world.generated(eos, **options)
        if oracle is not None:
            llm = oracle(dict(zip(world.truths, want, strict=True)))
        assert ids(llm, eos=(eos,), **options) == want


# -- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default() -> LLM:
    return paceline.load("smollm2-135m", drafter="none")


TEXTS = [
    "List the days of the week, then list the days of the week again.",
    "Copy this line three times: the quick brown fox jumps over the lazy dog.",
]


@pytest.fixture(scope="module")
def default_truth(default: LLM) -> list[list[int]]:
    """Plain decoding, each prompt alone."""
    return [default.generate(text, max_new_tokens=24).tokens for text in TEXTS]


@pytest.mark.model
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in OPTIONS or name in SHIPPED])
def test_default_model(default: LLM, default_truth: list[list[int]], drafter: str) -> None:
    """Greedy in float32, in a batch: what plain decoding gives for each prompt alone."""
    outputs = default.method(drafter).generate(TEXTS, max_new_tokens=24)
    assert [output.tokens for output in outputs] == default_truth


@pytest.mark.model
@pytest.mark.parametrize("batch", [1, 2])
def test_default_model_trees(default: LLM, default_truth: list[list[int]], batch: int) -> None:
    prompts = [default.encode(text) for text in TEXTS]
    truths = {tuple(prompt): truth for prompt, truth in zip(prompts, default_truth, strict=True)}
    llm = default.method(lambda target: Oracle(target, truths), "fixed:k=6")
    assert ids(llm, batch, prompts, max_new_tokens=24, eos=None) == default_truth
