"""Training stop predictors: what is noted of drafts, and what is learnt from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import paceline
from helpers import one_thread, perturbed  # noqa: F401
from paceline import LLM
from paceline.drafters.draft_model import DraftModel
from paceline.errors import DataError, OptionError, TrainingError
from paceline.policies.predictor_file import load, save
from paceline.policies.predictors import STEPS, TOP, FeaturePredictor, HiddenPredictor
from paceline.targets.reference import BlockTarget
from paceline.training.data.samples import Manifest
from paceline.training.stop_predictor import collect as stop_collect
from paceline.training.stop_predictor.collect import Recorder, collect
from paceline.training.stop_predictor.examples import Examples
from paceline.training.stop_predictor.fit import FORMS, Factored, FitConfig, fit
from tiny import small_llama

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100, 3], [1, 2, 3, 4] * 5, [42, 43], [9], [8, 8, 8, 1]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With a draft model that is right now and then."""
    other = BlockTarget(perturbed(small_llama(), 0.05))
    return paceline.load(small_llama(), drafter=lambda target: DraftModel(target, model=other), policy="fixed")


@pytest.fixture(scope="module")
def examples(llm: LLM) -> Examples:
    return collect(llm, PROMPTS, k=4, max_new_tokens=24, batch=3)


def table(score, count: int = 4000, width: int = 6, draft_width: int = 4, seed: int = 0) -> Examples:
    """Random tokens, accepted with the log-odds that `score` gives them."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(count, TOP, generator=generator).pow(4).sort(descending=True).values
    q = q / q.sum(-1, keepdim=True)
    made = Examples(
        torch.cat([torch.special.entr(q).sum(-1, keepdim=True), q], -1),
        torch.randint(0, 12, (count,), generator=generator),
        torch.zeros(count, dtype=torch.bool),
        torch.arange(count) // 20,
        5 + 100 * torch.randn(count, width, generator=generator),  # as uneven as hidden states are
        torch.randn(count, draft_width, generator=generator),
        {"target": "model", "drafter": "draft"},
    )
    made.accepted = torch.rand(count, generator=generator) < score(made).sigmoid()
    return made


def same(found: Examples, wanted: Examples) -> None:
    assert found.facts == wanted.facts
    for name, value in vars(wanted).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, name), value), name


def by_hidden(made: Examples) -> torch.Tensor:
    """Eq. 5 with a vector for each depth."""
    vectors = torch.linspace(-1, 1, STEPS * 6).view(STEPS, 6)[made.depth.clamp(max=STEPS - 1)]
    return (vectors * (made.target - 5) / 100).sum(-1) * 2 + made.draft @ torch.tensor([1.0, -1.0, 0.5, 2.0])


class TestExamples:
    def test_are_the_tokens_that_were_judged(self, llm: LLM) -> None:
        policy = Recorder(k=4, width=None)
        uniform = torch.full((5,), 0.2)
        for drafted, accepted in ((4, 2), (4, 4), (3, 0), (0, 0)):
            assert policy.more(0)
            for depth in range(4):
                policy.keep(uniform, depth)
            policy.observe(drafted, accepted)
        noted = [(depth, verdict) for _, depth, verdict, _, _ in policy.examples]
        assert noted == [
            *[(0, True), (1, True), (2, False)],
            *[(0, True), (1, True), (2, True), (3, True)],
            (0, False),
        ]

    def test_of_an_engine(self, llm: LLM, examples: Examples) -> None:
        """Against the statistics of the same run; hidden states are those of the position."""
        outputs = llm.method(lambda target: llm.drafter, "fixed:k=4").generate(PROMPTS, max_new_tokens=24, batch=3)
        for index, output in enumerate(outputs):
            rows = (examples.prompt == index).nonzero()[:, 0]
            rounds = output.stats.rounds[1 if len(PROMPTS[index]) == 1 else 0 :]  # nothing is verified before that
            judged = sum(min(r.accepted + 1, r.depth) for r in rounds)
            assert abs(len(rows) - judged) <= 1  # the last round may have accepted more than it could say
            assert int(examples.accepted[rows].sum()) == pytest.approx(sum(r.accepted for r in rounds), abs=1)
        assert 0.2 < float(examples.accepted.float().mean()) < 0.98
        assert examples.target.shape == examples.draft.shape == (len(examples), 32)
        sharp = examples.signals[:, 1]
        assert float(sharp.min()) > 0
        assert float(sharp.max()) <= 1
        assert int(examples.depth.max()) == 3

    def test_of_a_drafter_that_copies(self, llm: LLM) -> None:
        """A copy has no hidden state: predictors are shown zeros."""
        copying = llm.method(lambda target: DraftModel(target, model=llm.drafter.drafter, copy=True))
        made = collect(copying, [[1, 2, 3, 4] * 8, [5, 6, 7, 5, 6, 7, 5, 6]], k=4, max_new_tokens=24, batch=2)
        copied = (made.draft == 0).all(1)
        assert copied.any()
        assert not copied.all()

    def test_a_seed_gives_the_same(self, llm: LLM, examples: Examples) -> None:
        again = collect(llm, PROMPTS, k=4, max_new_tokens=24, batch=2)
        assert torch.equal(again.signals, examples.signals)
        assert torch.equal(again.draft, examples.draft)

    def test_prompts_take_turns_in_temperatures(self, llm: LLM, examples: Examples) -> None:
        mixed = collect(llm, PROMPTS, k=4, max_new_tokens=24, batch=3, temperatures=(0.0, 1.5), seed=1)
        for index in range(4):
            first, second = (made.signals[made.prompt == index] for made in (examples, mixed))
            assert torch.equal(first, second) == (index % 2 == 0)

    def test_without_hidden_states(self, llm: LLM) -> None:
        made = collect(llm.method("prompt-lookup:budget=8", "fixed"), PROMPTS, k=3, max_new_tokens=16)
        assert made.target is made.draft is None
        assert made.facts["drafter"] == "prompt-lookup"
        with pytest.raises(OptionError, match="prompt-lookup shows none"):
            fit("specdec++", made, FitConfig())

    def test_nothing_drafted(self, llm: LLM) -> None:
        with pytest.raises(DataError, match="drafted nothing"):
            collect(llm.method("none"), PROMPTS, max_new_tokens=4)

    def test_a_run_that_was_stopped_goes_on(
        self, llm: LLM, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed in the midst of the second of three shards, then after the last: as uninterrupted, and nothing is made
        twice."""
        monkeypatch.setattr(stop_collect, "GROUP", 2)
        how = {"k": 4, "max_new_tokens": 24, "folder": tmp_path / "e"}
        told: list[int] = []

        class Killed(BaseException):
            pass

        def kill(done: int, count: int) -> None:
            told.append(done)
            if done == 3:
                raise Killed

        with pytest.raises(Killed):
            collect(llm, PROMPTS, **how, progress=kill)
        assert told == [1, 2, 3]
        (tmp_path / "e" / ".examples-00001.safetensors.partial").write_bytes(b"half")
        again = collect(llm, PROMPTS, **how, batch=2, progress=lambda done, count: told.append(done))
        assert told == [1, 2, 3, 2, 3, 4, 5, 6]
        monkeypatch.setattr(stop_collect, "_record", None)
        for made in (again, collect(llm, PROMPTS, **how)):
            same(made, examples)
        assert not list((tmp_path / "e").glob(".*partial"))
        for other in ({"k": 3}, {"seed": 1}, {"temperatures": (0.5,)}, {"method": "other"}):
            with pytest.raises(DataError, match=f"another {'drafter' if 'method' in other else next(iter(other))}:"):
                collect(llm, PROMPTS, **{**how, **other})
        with pytest.raises(DataError, match="another prompts"):
            collect(llm, PROMPTS[1:], **how)
        monkeypatch.setattr(llm.drafter, "folder", tmp_path / "another")
        with pytest.raises(DataError, match="another head"):
            collect(llm, PROMPTS, **how)

    def test_what_was_made_otherwise_is_thrown_away(self, llm: LLM, examples: Examples, tmp_path: Path) -> None:
        """Where that is asked for; files that are not ours stay."""
        how = {"max_new_tokens": 24, "batch": 3, "folder": tmp_path}
        collect(llm, PROMPTS[:3], **how, k=3)
        (tmp_path / "mine").touch()
        (tmp_path / "examples-00007.safetensors").touch()
        with pytest.raises(DataError, match=f"{tmp_path} holds .* another .*: delete that folder, or choose another"):
            collect(llm, PROMPTS, **how, k=4)
        same(collect(llm, PROMPTS, **how, k=4, anew=True), examples)
        assert {path.name for path in tmp_path.glob("[!.]*")} == {"mine", "manifest.json", "examples-00000.safetensors"}

    def test_a_damaged_shard_is_made_again(
        self, llm: LLM, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stop_collect, "GROUP", 3)
        how = {"k": 4, "max_new_tokens": 24, "batch": 3, "folder": tmp_path}
        collect(llm, PROMPTS, **how)
        first = tmp_path / "examples-00000.safetensors"
        first.write_bytes(first.read_bytes()[:-9])
        same(collect(llm, PROMPTS, **how), examples)
        assert Manifest(tmp_path).read()["totals"] == {"prompts": 6, "examples": len(examples)}

    def test_files(self, examples: Examples, tmp_path: Path) -> None:
        examples.save(tmp_path / "new" / "e.safetensors")
        same(Examples.load(tmp_path / "new" / "e.safetensors"), examples)
        (tmp_path / "bad").write_bytes(b"nonsense")
        for path, what in (
            (tmp_path / "bad", "does not hold examples"),
            (tmp_path / "none", "cannot read|does not hold"),
        ):
            with pytest.raises(DataError, match=what):
                Examples.load(path)


class TestFit:
    def test_features(self) -> None:
        """The weights that made the verdicts come back, as far as so many verdicts can tell."""
        truth = torch.tensor([-1.0, 0.5, 3.0, -1.0, -1.5])

        def score(made: Examples) -> torch.Tensor:
            return FeaturePredictor.features(made.seen(torch.arange(len(made)))) @ truth

        made = table(score)
        predictor, origin = fit("cali-ts", made, FitConfig(epochs=60))
        everything = made.seen(torch.arange(len(made)))
        gap = (predictor(everything).sigmoid() - score(made).sigmoid()).abs().mean()
        assert gap < 0.03
        held = origin.trained["held_back"]
        assert held["loss"] < held["loss_of_the_rate"] - 0.01
        assert held["calibration_error"] < 0.08

    @pytest.mark.parametrize(("form", "units"), [("full", 1), ("low-rank", 1), ("full", 8)])
    def test_hidden(self, form: str, units: int) -> None:
        config = FitConfig(form=form, rank=2, units=units, epochs=30, lr=5e-3)
        predictor, origin = fit("cali-ts", table(by_hidden), config)
        held = origin.trained["held_back"]
        assert held["loss"] < 0.75 * held["loss_of_the_rate"]
        assert held["auc"] > 0.8
        assert predictor.kind == "hidden"
        matrices = STEPS * 6 * (6 if form == "full" else 2 * 2)
        assert origin.trained["parameters"]["trained"] > matrices > origin.trained["parameters"]["stored"] / 10

    def test_residual_and_top(self) -> None:
        """What no linear form could learn."""
        bent = table(lambda made: 3 * (made.draft[:, 0].abs() - 0.8) * 2)
        _, origin = fit("specdec++", bent, FitConfig(epochs=30, lr=3e-3, rejection_weight=1.0))
        assert origin.trained["held_back"]["auc"] > 0.8
        near = table(lambda made: 6 - 60 * (made.signals[:, 1] - 0.4).abs())
        _, origin = fit("disco", near, FitConfig(epochs=40, lr=1e-2))
        assert origin.trained["held_back"]["auc"] > 0.85

    def test_rejections_weigh_more_in_specdec(self) -> None:
        made = table(by_hidden)
        rows = torch.arange(len(made))
        light, _ = fit("specdec++", made, FitConfig(epochs=20, rejection_weight=1.0))
        heavy, _ = fit("specdec++", made, FitConfig(epochs=20))
        assert heavy(made.seen(rows)).sigmoid().mean() < light(made.seen(rows)).sigmoid().mean() - 0.1

    @pytest.mark.parametrize("rank", [None, 3])
    def test_folding_changes_nothing(self, rank: int | None) -> None:
        torch.manual_seed(0)
        made = table(by_hidden, count=50)
        model = Factored(HiddenPredictor(6, 4, units=5), rank)
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape) / 3
        seen = made.seen(torch.arange(50))
        seen = seen._replace(target=seen.target / 100)
        before = model(seen)
        torch.testing.assert_close(model.fold()(seen), before)

    def test_full_is_equation_5(self) -> None:
        """sigmoid(W_p [W^i h_target; h_draft]) with the matrices that are trained."""
        torch.manual_seed(0)
        made = table(by_hidden, count=20)
        model = Factored(HiddenPredictor(6, 4), None)
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape)
        model.predictor.bias.data.zero_()
        seen = made.seen(torch.arange(20))
        w_p = torch.cat([model.left, model.predictor.draft], 1)[0]
        for row, score in enumerate(model(seen)):
            matrix = model.narrow[min(int(seen.depth[row]) + 1, 10) - 1]
            want = w_p @ torch.cat([matrix @ seen.target[row], seen.draft[row]])
            torch.testing.assert_close(score, want, rtol=1e-4, atol=1e-3)

    def test_every_form_on_real_drafts(self, llm: LLM, examples: Examples, tmp_path: Path) -> None:
        """Trained, saved, and then decided by: greedy output is plain decoding's."""
        plain = llm.method("none").generate(PROMPTS, max_new_tokens=24)
        for policy, forms in FORMS.items():
            for form in forms:
                predictor, origin = fit(policy, examples, FitConfig(form=form, epochs=2, held_back=0.4))
                path = tmp_path / f"{form}.safetensors"
                save(path, predictor, origin)
                assert load(path, policy).origin.trained["data"]["k"] == 4
                made = llm.method(lambda target: llm.drafter, f"{policy}:predictor={path}")
                outputs = made.generate(PROMPTS, max_new_tokens=24, batch=3)
                assert [output.tokens for output in outputs] == [output.tokens for output in plain]

    def test_a_seed_gives_the_same(self) -> None:
        made = table(by_hidden, count=600)
        first, second, other = (
            fit("disco", made, FitConfig(epochs=2, seed=seed))[0].net[0].weight for seed in (0, 0, 1)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)

    def test_the_best_epoch_is_kept(self) -> None:
        """Nothing can be learnt here: training longer only makes it worse."""
        noise = table(lambda made: torch.zeros(len(made)), count=400)
        told = []
        _, origin = fit("specdec++", noise, FitConfig(epochs=24, lr=1e-2, rejection_weight=1.0), told.append)
        assert origin.trained["epoch"] < 24
        best = min([now.held_back for now in told])
        assert told[-1].held_back > best
        assert [now.epoch for now in told] == list(range(1, 25))

    def test_what_cannot_be_learnt_from(self) -> None:
        made = table(by_hidden, count=200)
        for verdict in (True, False):
            made.accepted[:] = verdict
            with pytest.raises(DataError, match="more prompts are needed"):
                fit("disco", made, FitConfig())
        with pytest.raises(OptionError, match="has no predictor of form 'full'"):
            fit("disco", made, FitConfig(form="full"))

    def test_a_loss_that_is_no_number(self) -> None:
        for row in range(0, 400, 20):
            made = table(by_hidden, count=400)
            made.draft[row] = torch.nan  # whether it is trained on or held back
            with pytest.raises(TrainingError, match=r"the loss is nan in epoch [01]"):
                fit("specdec++", made, FitConfig(epochs=1))

    @pytest.mark.parametrize(
        "bad",
        [
            {"rank": 0},
            {"epochs": 0},
            {"lr": 0.0},
            {"lr": float("inf")},
            {"held_back": 1.0},
            {"rejection_weight": -1.0},
            {"units": 0},
        ],
    )
    def test_out_of_range(self, bad) -> None:
        with pytest.raises(OptionError, match=next(iter(bad))):
            FitConfig(**bad)


def test_another_head_is_noticed(tmp_path: Path) -> None:
    """Of EAGLE-3 as well, and of layouts of others, whose configuration does not name the weights."""
    drafter = SimpleNamespace(folder=tmp_path, source="eagle")
    seen = {stop_collect._head(drafter)}  # type: ignore[arg-type]
    for name, text in (
        ("model.safetensors", "a"),
        ("model.safetensors", "b"),
        ("eagle3.json", "c"),
        ("eagle3.json", "d"),
    ):
        (tmp_path / name).write_text(text)
        seen.add(stop_collect._head(drafter))  # type: ignore[arg-type]
    assert len(seen) == 5
