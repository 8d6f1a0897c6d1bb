"""Stop predictors, their files, and SpecDec++ and DISCO, which stop by them."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import predictor_files
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError
from paceline.policies import POLICIES
from paceline.policies.base import Setting
from paceline.policies.cali_ts import CaliTS
from paceline.policies.disco import Disco
from paceline.policies.predictor_file import Origin, Trained, load, save
from paceline.policies.predictors import (
    STEPS,
    FeaturePredictor,
    HiddenPredictor,
    Predictor,
    ResidualPredictor,
    Seen,
    TopPredictor,
    signals,
)
from paceline.policies.specdec_pp import SpecDecPP
from paceline.policies.sureness import Sureness

HERE = Setting("model", "draft", 6, 4)
FORMS = [
    FeaturePredictor(),
    HiddenPredictor(6, 4),
    HiddenPredictor(6, 4, units=3),
    ResidualPredictor(4),
    TopPredictor(),
]


def seen(count: int = 5, seed: int = 0) -> Seen:
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(count, 20, generator=generator).softmax(-1)
    return Seen(
        torch.stack([signals(row) for row in q]),
        torch.arange(count) * 3,
        torch.randn(count, 6, generator=generator),
        torch.randn(count, 4, generator=generator),
    )


class Says(Predictor):
    """Says what it is told, by depth."""

    kind = "says"

    def __init__(self, *chances: float) -> None:
        super().__init__()
        self.chances = chances

    def forward(self, seen: Seen) -> torch.Tensor:
        return torch.tensor([math.log(p / (1 - p)) for p in [self.chances[int(depth)] for depth in seen.depth]])


def told(policy, *chances: float):
    """A policy with such a predictor."""
    policy.trained = Trained(Says(*chances), Origin(policy.name, "model", "draft"), "nowhere")
    return policy


def draft(policy) -> int:
    """How many tokens it drafts."""
    depth = 0
    while policy.more(depth) and policy.keep(None, depth):
        depth += 1
    return depth


class TestForms:
    def test_signals(self) -> None:
        found = signals(torch.tensor([0.5, 0.0, 0.25, 0.25]))
        assert found.tolist() == pytest.approx([1.5 * math.log(2), 0.5, 0.25, 0.25] + [0] * 7)
        assert signals(None).tolist() == [0, 1] + [0] * 9
        assert signals(torch.full((30,), 1 / 30)).tolist() == pytest.approx([math.log(30)] + [1 / 30] * 10, abs=1e-6)

    def test_features(self) -> None:
        shown = Seen(signals(torch.tensor([0.7, 0.2, 0.1])).expand(3, -1), torch.tensor([0, 4, 99]))
        entropy = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))
        got = FeaturePredictor.features(shown)
        for row, depth in zip(got.tolist(), (0.0, 0.4, 1.0), strict=True):
            assert row == pytest.approx([1, entropy, 0.7, 0.5, depth], abs=1e-6)

    @torch.inference_mode()
    def test_hidden_is_equation_5(self) -> None:
        """sigmoid(W_p [W^i h_target; h_draft]), with W_p W^i multiplied out."""
        generator = torch.Generator().manual_seed(0)
        matrices = torch.randn(STEPS, 6, 6, generator=generator)
        w_p = torch.randn(6 + 4, generator=generator)
        predictor = HiddenPredictor(6, 4)
        predictor.target.data = (w_p[:6] @ matrices)[:, None]
        predictor.draft.data = w_p[None, 6:]
        shown = seen()
        for index in range(5):
            i = min(int(shown.depth[index]) + 1, 10)
            want = w_p @ torch.cat([matrices[i - 1] @ shown.target[index], shown.draft[index]])
            assert float(predictor(shown)[index]) == pytest.approx(float(want), abs=1e-4)

    def test_residual_blocks_begin_as_the_identity(self) -> None:
        predictor = ResidualPredictor(4)
        shown = seen()
        assert torch.allclose(predictor(shown), predictor.out(shown.draft)[:, 0])
        first, last = predictor.blocks[0], predictor.blocks[-1]
        assert first is not last  # blocks of their own

    @pytest.mark.parametrize("predictor", FORMS, ids=lambda p: p.kind)
    def test_one_at_a_time(self, predictor: Predictor) -> None:
        """What a policy asks token by token is what training sees as a table."""
        predictor = predictor_files.shuffled(predictor)
        q = torch.rand(4, 20).softmax(-1)
        target, hidden = torch.randn(4, 6), torch.randn(4, 4)
        table = Seen(torch.stack([signals(row) for row in q]), torch.arange(4), target, hidden)
        want = predictor(table).sigmoid().tolist()
        for depth in range(4):
            one = predictor.see(q[depth], depth, target[depth].double(), hidden[depth].double())
            assert predictor.probability(one) == pytest.approx(want[depth], abs=1e-5)

    def test_hidden_states_that_are_not_there_yet(self) -> None:
        predictor = predictor_files.shuffled(HiddenPredictor(6, 4))
        assert 0 < predictor.probability(predictor.see(None, 0, None, torch.ones(4))) < 1


class TestFiles:
    @pytest.mark.parametrize("predictor", FORMS, ids=lambda p: p.kind)
    def test_come_back(self, predictor: Predictor, tmp_path: Path) -> None:
        predictor_files.shuffled(predictor)
        origin = Origin("cali-ts", "model", "draft", {"loss": 0.5})
        save(tmp_path / "a" / "p.safetensors", predictor, origin)
        found = load(tmp_path / "a" / "p.safetensors", "cali-ts")
        assert (found.origin, found.origin.trained) == (origin, {"loss": 0.5})
        assert torch.equal(found.predictor(seen()), predictor(seen()))
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["p.safetensors"]

    def test_are_read_once_until_they_change(self, tmp_path: Path) -> None:
        path = tmp_path / "p.safetensors"
        save(path, FeaturePredictor(), Origin("cali-ts", "m", "d"))
        first = load(path, "cali-ts")
        assert load(path, "cali-ts") is first
        save(path, predictor_files.shuffled(FeaturePredictor()), Origin("cali-ts", "m", "d"))
        assert not torch.equal(load(path, "cali-ts").predictor.weights, first.predictor.weights)

    def test_damaged(self, tmp_path: Path) -> None:
        path = tmp_path / "p.safetensors"
        with pytest.raises(CheckpointError, match="there is no stop predictor"):
            load(path, "disco")
        path.write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match="not a stop predictor"):
            load(path, "disco")
        save_file({"x": torch.zeros(1)}, path)
        with pytest.raises(CheckpointError, match="not a stop predictor"):
            load(path, "disco")
        save(path, TopPredictor(), Origin("disco", "m", "d"))
        tensors = load_file(path)
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="not a stop predictor"):
            load(path, "disco")
        assert tensors

    def test_of_another_policy(self, tmp_path: Path) -> None:
        save(tmp_path / "p", TopPredictor(), Origin("disco", "m", "d"))
        with pytest.raises(CheckpointError, match=r"of the policy disco, not of specdec\+\+"):
            SpecDecPP(predictor=str(tmp_path / "p"))
        with pytest.raises(CheckpointError, match="of the policy disco, not of cali-ts"):
            POLICIES.parse(f"cali-ts:predictor={tmp_path / 'p'}").build()

    def test_for_another_model(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Other widths cannot be; another name may be, and is told once."""
        save(tmp_path / "p", ResidualPredictor(4), Origin("specdec++", "model", "draft"))
        for wrong in (Setting("model", "draft", 6, 5), Setting("other", "draft", 6, 8)):
            with pytest.raises(CheckpointMismatch, match="was trained for model with the drafter draft"):
                SpecDecPP(predictor=str(tmp_path / "p")).check(wrong)
        with caplog.at_level(logging.WARNING, "paceline"):
            SpecDecPP(predictor=str(tmp_path / "p")).check(HERE)
            assert not caplog.records
            for _ in range(3):
                SpecDecPP(predictor=str(tmp_path / "p")).check(Setting("cousin", "draft", 6, 4))
        assert len(caplog.records) == 1
        assert "not for cousin" in caplog.text

    def test_that_come_with_the_drafter(self, tmp_path: Path) -> None:
        here = Setting("tests", "tests", 6, 4, (tmp_path,))
        for policy in (SpecDecPP(), Disco()):
            with pytest.raises(OptionError, match="paceline train stop-predictor"):
                policy.check(here)
        plain = CaliTS()
        plain.check(here)
        assert not plain.reads_hidden
        predictor_files.write(tmp_path, 6, 4)
        for policy in (SpecDecPP(), Disco(), CaliTS()):
            policy.check(here)
            assert policy.more(0)
            assert policy.keep(torch.full((5,), 0.2), 0, torch.ones(4))
        assert policy.reads_hidden
        assert policy.predictor.kind == "hidden"

    def test_hidden_states_that_nobody_shows(self, tmp_path: Path) -> None:
        predictor_files.write(tmp_path, 6, 4)
        for width in (6, None):
            setting = Setting("tests", "n-grams", width, None, (tmp_path,))
            for policy in (SpecDecPP(), CaliTS()):
                with pytest.raises(OptionError, match="n-grams has none to show"):
                    policy.check(setting)
            Disco().check(setting)
        with pytest.raises(OptionError, match="whole does not show"):
            CaliTS().check(Setting("whole", "tests", None, 4, (tmp_path,)))
        SpecDecPP().check(Setting("tests", "tests", None, 4, (tmp_path,)))  # looks at the drafter's only


class TestStopRules:
    def test_specdec(self) -> None:
        """Chances .9, .8, .7: some rejection has probability .1, .28, .496."""
        for threshold, length in ((0.05, 1), (0.27, 2), (0.29, 3), (0.49, 3), (0.5, 4), (1.0, 4)):
            policy = told(SpecDecPP(threshold=threshold, k_max=4), 0.9, 0.8, 0.7, 0.6)
            assert draft(policy) == length
            assert draft(policy) == length  # rounds do not add up

    def test_disco(self) -> None:
        for threshold, length in ((0.95, 1), (0.85, 2), (0.7, 4), (0.3, 5)):
            assert draft(told(Disco(threshold=threshold, k_max=5), 0.9, 0.8, 0.75, 0.6, 0.5)) == length

    @pytest.mark.parametrize("policy", [SpecDecPP, Disco])
    def test_the_token_at_which_it_stops(self, policy) -> None:
        """Kept, as in the papers, or dropped."""
        assert draft(told(policy(threshold=0.4), 0.9, 0.1)) == 2
        assert draft(told(policy(threshold=0.4, keep_last=False), 0.9, 0.1)) == 1
        assert draft(told(policy(threshold=0.4, keep_last=False), 0.1)) == 0

    @pytest.mark.parametrize("policy", [SpecDecPP, Disco])
    @pytest.mark.parametrize("bad", [{"k_max": -1}, {"threshold": 1.5}, {"threshold": -0.1}])
    def test_out_of_range(self, policy, bad) -> None:
        with pytest.raises(OptionError, match=next(iter(bad))):
            policy(**bad)


class TestCaliTS:
    @pytest.mark.parametrize("name", ["cali-ts", "specdec++", "disco"])
    def test_copies_are_judged_by_their_source(self, name: str, tmp_path: Path) -> None:
        """The predictor knows what the drafter drafts, whose states a copy has none of."""
        policy = POLICIES.parse(predictor_files.write(tmp_path, 6, 4)[name]).build()
        policy.check(HERE)
        for sure, go_on in ((Sureness(0.99, 0.05), True), (Sureness(1e-4, 0.001), False)):
            wanted = [policy.more(0) and policy.keep_copy(sure, 0) and policy.more(1) for _ in range(40)]
            assert sum(wanted) > 30 if go_on else sum(wanted) < 10
        policy.observe(1, 1)

    def test_sees_both_hidden_states(self, tmp_path: Path) -> None:
        predictor = predictor_files.shuffled(HiddenPredictor(6, 4))
        save(tmp_path / "p", predictor, Origin("cali-ts", "model", "draft"))
        policy = CaliTS(predictor=str(tmp_path / "p"))
        policy.check(HERE)
        assert policy.reads_hidden
        assert not policy.reads_q
        shown = seen(3)
        for start in range(2):
            policy.begin_round(shown.target[start])
            policy.more(0)
            for depth in range(3):
                policy.keep(None, depth, shown.draft[depth])
            table = Seen(shown.signals, torch.arange(3), shown.target[start].expand(3, -1), shown.draft)
            assert policy._predictions == pytest.approx(predictor(table).sigmoid().tolist(), abs=1e-6)
            policy.observe(3, 1)

    @torch.inference_mode()
    def test_a_trained_regression_goes_on_learning_unless_told_not_to(self, tmp_path: Path) -> None:
        trained = predictor_files.shuffled(FeaturePredictor())
        save(tmp_path / "p", trained, Origin("cali-ts", "model", "draft"))
        for learn in (True, False):
            policy = CaliTS(predictor=str(tmp_path / "p"), learn=learn)
            policy.check(HERE)
            assert (policy.online is not None) == learn
        assert policy.online is None
        policy.more(0)
        policy.keep(torch.tensor([0.6, 0.4]), 0)
        shown = Seen(signals(torch.tensor([0.6, 0.4]))[None], torch.tensor([0]))
        assert policy._predictions == pytest.approx([float(trained(shown).sigmoid())])
