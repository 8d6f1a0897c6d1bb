"""Training Medusa and EAGLE heads: they learn, what is measured is what drafts do, and stops change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from helpers import one_thread  # noqa: F401
from paceline.drafters.dflash.head import DFlashHead
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.errors import CheckpointError, CheckpointMismatch, DataError, OptionError
from paceline.targets.reference import as_target
from paceline.training.data.dataset import IGNORE
from paceline.training.data.samples import UNKNOWN
from paceline.training.heads.adversarial import AdversarialOptions
from paceline.training.heads.dflash import DFlashOptions, prepare_dflash
from paceline.training.heads.eagle import Eagle3Options, EagleOptions, prepare_eagle, prepare_eagle3
from paceline.training.heads.frozen_layers import cut
from paceline.training.heads.head_task import ahead
from paceline.training.heads.initial_weights import Regression
from paceline.training.heads.medusa import RANKS, MedusaOptions, prepare_medusa
from paceline.training.heads.prepare import PreparedTraining, TrainingPlan
from paceline.training.heads.rollout import rollout
from paceline.training.trainer import Report, TrainConfig, Trainer
from tiny import small_llama
from tiny_families import tiny

CPU = torch.device("cpu")
TRAIN = {"epochs": 2, "tokens": 300, "accumulate": 2, "report": 4, "held_back": 4, "lr": 3e-3}
KINDS: dict[str, tuple[Callable[..., PreparedTraining], Any, Any]] = {
    "medusa": (prepare_medusa, MedusaOptions, MedusaHead),
    "eagle": (prepare_eagle, EagleOptions, EagleHead),
    "eagle3": (prepare_eagle3, Eagle3Options, Eagle3Head),
    "eagle3-added": (prepare_eagle3, partial(Eagle3Options, token="added"), Eagle3Head),
    "dflash": (prepare_dflash, partial(DFlashOptions, block=4), DFlashHead),
    "eagle3-shallow": (prepare_eagle3, partial(Eagle3Options, token="added", shallow=1), Eagle3Head),
}
EAGLES = [kind for kind in KINDS if kind.startswith("eagle")]


def assembled(kind: str, model: Path, data: Path, weight: float = 0.0, **options: Any) -> PreparedTraining:
    make, kinds, _ = KINDS[kind]
    adversarial = AdversarialOptions(weight) if weight else None
    return make(
        str(model), [data], kinds(**{"vocab": 120, **options}), TrainingPlan(TrainConfig(**TRAIN), CPU), adversarial
    )


def trainer(made: PreparedTraining, out: Path, resume: bool = False, **options: Any) -> Trainer:
    config = TrainConfig(**{**TRAIN, **options})
    return Trainer(made.task, made.data, config, out, Accelerator(cpu=True), settings=made.settings, resume=resume)


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_start_from_states_of_which_some_are_always_zero() -> None:
    """As behind a norm whose weight is zero there: what they say of nothing is nothing."""
    x, wanted = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)), torch.arange(10.0).view(2, 5)
    x[:, 3] = wanted[:, 3] = 0
    found = Regression(5, 2, CPU)
    found.add(x, x @ wanted.T)
    torch.testing.assert_close(found.solve(), wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_fits_its_model(kind: str, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    made = assembled(kind, tiny_model_dir, tiny_data, layers=2, vocab=None)
    measured = trainer(made, tmp_path, epochs=6).run()
    first = curve(tmp_path)[0]
    # A token's own state tells a model of three layers nearly all: so fitted, a head starts near the end.
    assert measured["held_back_loss"] < first["held_back_loss"] - (0.02 if kind == "eagle3-shallow" else 0.1)
    assert measured["accepted_1"] >= measured["accepted_2"]
    head = KINDS[kind][2].load(tmp_path, as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir)))
    assert head.config.layers == 2
    assert head.config.trained["measured"] == measured
    assert made.home.name == "k2"
    with pytest.raises(CheckpointMismatch):
        KINDS[kind][2].load(tmp_path, as_target(small_llama(seed=1).float()))


def test_taps_in_any_order(tiny_model_dir: Path, tiny_data: Path) -> None:
    some, others = (
        assembled("eagle3", tiny_model_dir, tiny_data, taps=taps, stored=False) for taps in ((1, 2), (2, 1))
    )
    batch = some.data.batch([3])
    torch.testing.assert_close(others.task.frozen(batch), some.task.frozen(batch))


def test_kept_layers_keep_their_types() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = cut(tiny("gemma3", num_hidden_layers=4, layer_types=types), 2, 1)
    assert model.config.layer_types == ["sliding_attention"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_without_a_store(kind: str, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    for stored in (True, False):
        trainer(assembled(kind, tiny_model_dir, tiny_data, stored=stored), tmp_path / str(stored), steps=3).run()
    kept, made = curve(tmp_path / "True")[-1], curve(tmp_path / "False")[-1]
    assert made["held_back_loss"] == pytest.approx(kept["held_back_loss"], rel=1e-3)  # a store rounds to float16


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_a_trained_head(kind: str, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """With that head's weights and vocabulary; one of another shape is refused."""
    made = assembled(kind, tiny_model_dir, tiny_data, vocab=90)
    with torch.no_grad():
        for weight in made.task.head.parameters():
            weight += 0.1
    made.task.save(tmp_path / "before", {})
    again = assembled(kind, tiny_model_dir, tiny_data, vocab=50, init=str(tmp_path / "before"))
    before, after = (one.task.head.state_dict() for one in (made, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.settings["init"]
    with pytest.raises(OptionError, match="the head to go on from has other layers"):
        assembled(kind, tiny_model_dir, tiny_data, layers=2, init=str(tmp_path / "before"))
    with pytest.raises(CheckpointError):
        assembled(kind, tiny_model_dir, tiny_data, init=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("options", [{"shallow": 1}, {"taps": (1, 2)}, {"taps": (1, 3), "shallow": 1}])
def test_it_goes_on_reading_other_states(
    options: dict[str, Any], tiny_model_dir: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """As near as linear maps of them come to what the head read before: its layers start as they were."""
    before = assembled("eagle3-added", tiny_model_dir, tiny_data, taps=(2, 3))
    learnt = trainer(before, tmp_path / "before", epochs=4).run()["held_back_loss"]
    untrained = curve(tmp_path / "before")[0]["held_back_loss"]
    after = assembled("eagle3-added", tiny_model_dir, tiny_data, init=str(tmp_path / "before"), **options)
    learnt_weights, taken = (one.task.head.state_dict() for one in (before, after))
    changed = {name for name, weight in taken.items() if not torch.equal(weight, learnt_weights[name])}
    assert changed == {"fc.weight", "token_in.weight"}
    assert trainer(after, tmp_path / "after").measure()["held_back_loss"] < (learnt + untrained) / 2


def test_a_token_beside_the_state_keeps_its_place(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    assembled("eagle3", tiny_model_dir, tiny_data).task.save(tmp_path, {})
    with pytest.raises(OptionError, match="--token beside cannot go on from one with another --shallow"):
        assembled("eagle3", tiny_model_dir, tiny_data, init=str(tmp_path), shallow=1)


def test_medusa_learns_its_own_position(tiny_model_dir: Path, tiny_data: Path) -> None:
    """Head i at position t is asked for token t + 2 + i, and its choices are ranked as they are used."""
    made = assembled("medusa", tiny_model_dir, tiny_data, vocab=None)
    batch = made.data.batch([3, 7])
    drafts = made.task.drafts(batch)
    features = made.task.frozen(batch)
    logits = made.task.head(features)
    truth, row, weights = drafts.truth.each(drafts.truth.features), 0, []
    assert len(drafts.truth.features) < len(truth)
    for text, tokens in enumerate(batch.rows):
        for t in range(len(tokens)):
            asked = [t + 1 + i < len(tokens) and batch.labels[text, t + 1 + i] != IGNORE for i in range(4)]
            for i in range(4) if asked[0] else ():
                torch.testing.assert_close(drafts.logits[row], logits[text, t, i])
                assert torch.equal(drafts.hidden[row], features[text, t])
                assert (drafts.weights[row] > 0) == asked[i]
                if asked[i]:
                    assert torch.equal(truth[row], features[text, t + 1 + i])
                weights.append(float(drafts.weights[row]))
                row += 1
    assert row == len(drafts.logits)
    assert weights[1] / weights[0] == pytest.approx(0.8)
    with torch.inference_mode():
        made.task.measure(made.task.count(batch))
    assert len(made.task.accuracies) == 4
    for ranks in made.task.accuracies:
        assert len(ranks) == RANKS
        assert 0 < sum(ranks) <= 1


def read_by(head: EagleHead | Eagle3Head, frozen: torch.Tensor) -> torch.Tensor:
    """What the head reads, without the features after it."""
    return frozen[..., : len(head.reads) * head.lm.config.hidden_size] if head.reads else frozen


@pytest.mark.parametrize("kind", EAGLES)
def test_rollout_is_drafting_token_by_token(kind: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    made = assembled(kind, tiny_model_dir, tiny_data, layers=2)
    head: EagleHead | Eagle3Head = made.task.head
    with torch.no_grad():
        for index, weight in enumerate(head.parameters()):  # all parts of it in use
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
        batch = made.data.batch([5])
        frozen, ids = read_by(head, made.task.frozen(batch)[:, :12]), batch.ids[:, :12]
        guesses, tokens = list(rollout(head, frozen, ids, 3)), head.tokens_in(frozen, ids)
        for start in range(2, 8):
            state = head.fused(frozen[:, : start + 1])
            for n in range(3):
                want = head.run(state, tokens[:, 1 : start + n + 2])[:, -1]
                torch.testing.assert_close(guesses[n][:, start + n], want, rtol=1e-4, atol=1e-4)
                state = torch.cat([state, want[:, None]], 1)
        torch.testing.assert_close(guesses[0][:, :11], head(frozen, ids[:, 1:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", EAGLES)
def test_eagles_are_measured_as_they_draft(kind: str, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Drafting greedily from every position of a held-back text, on the head's own states."""
    made = assembled(kind, tiny_model_dir, tiny_data, vocab=None)
    trainer(made, tmp_path, epochs=1).run()
    head, [index] = made.task.head, [i for i in range(len(made.data)) if made.data.generated[i]][:1]
    batch = made.data.batch([index])
    ids, first = batch.ids[0].tolist(), int((batch.labels[0] != IGNORE).nonzero()[0])
    hits = starts = 0
    with torch.no_grad():
        read, counts = read_by(head, made.task.frozen(batch)), made.task.count(batch)
        fused, tokens = head.fused(read), head.tokens_in(read, batch.ids)
        for at in range(first - 1, len(ids) - 3):  # where the first token to draft, `at + 2`, is the model's
            state, text = fused[:, : at + 1], ids[: at + 2]
            for _ in range(2):
                if text != ids[: len(text)]:
                    break
                guess = head.run(state, tokens[:, 1 : len(text)])[:, -1:]
                state, text = torch.cat([state, guess], 1), [*text, int(head.outputs(guess).argmax())]
            hits, starts = hits + (text == ids[: at + 4]), starts + 1
    assert (counts[1], counts[6]) == (hits, starts)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dflash"])  # which drafts from other places
def test_whole_distributions(kind: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    """What heads learn then is what the model itself says of the tokens that they draft."""
    steps = {"rollout": 1} if kind in EAGLES else {}
    made = assembled(kind, tiny_model_dir, tiny_data, objective="whole", vocab=None, **steps)
    batch, heads = made.data.batch([3]), 4 if kind == "medusa" else 1
    drafts = made.task.drafts(batch, learning=False)
    with torch.no_grad():
        said = made.task.truth(drafts.truth.each(drafts.truth.features)).log_softmax(-1)
    starts = (ahead(batch.labels, 1, IGNORE)[0] != IGNORE).nonzero()[:, 0]  # positions t, which draft t + 2 and on
    for row in (drafts.weights > 0).nonzero()[:, 0].tolist():
        at = int(starts[row // heads]) + 1 + row % heads
        if batch.top_ids[0, at, 0] != UNKNOWN:
            torch.testing.assert_close(said[row, batch.top_ids[0, at]], batch.top_logp[0, at], rtol=1e-2, atol=1e-2)
    if kind == "medusa":
        wanted = (drafts.weights * -(said.exp() * drafts.logits.log_softmax(-1)).sum(-1)).sum()
        torch.testing.assert_close(drafts.loss, wanted)


def test_noise_is_another_at_every_step(tiny_model_dir: Path, tiny_data: Path) -> None:
    """A text that is a batch of its own meets other noise in the next epoch, and the same after a resumption."""
    made = assembled("eagle", tiny_model_dir, tiny_data)
    first, again, later = (made.task.drafts(made.data.batch([3], step)).logits for step in (0, 0, 7))
    assert torch.equal(first, again)
    assert (first != later).any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dflash"])  # which begins by saying the mask
def test_start(kind: str, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Better than saying the likeliest tokens of all the text, and of its seed."""
    made = assembled(kind, tiny_model_dir, tiny_data, layers=2)
    p = made.data.frequencies(257).clamp(min=1e-9)
    p /= p.sum()
    assert trainer(made, tmp_path).measure()["held_back_loss"] < -(p * p.log()).sum()
    other = KINDS[kind][0](
        str(tiny_model_dir), [tiny_data], KINDS[kind][1](layers=2, vocab=120), TrainingPlan(TrainConfig(seed=1), CPU)
    )
    assert any((a != b).any() for a, b in zip(made.task.head.parameters(), other.task.head.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_ends_at_the_head(kind: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    made = assembled(kind, tiny_model_dir, tiny_data, 0.2, layers=2)
    drafts = made.task.task.drafts(made.data.batch([3, 4]))
    assert not drafts.hidden.requires_grad
    assert not drafts.truth.features.requires_grad
    made.task.loss(made.data.batch([3, 4])).backward()
    for name, weight in made.task.head.named_parameters():
        assert weight.grad is not None, name


def test_nothing_to_go_on_with_is_told(
    tiny_model_dir: Path, tiny_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a folder that was named wrongly."""
    trainer(assembled("eagle", tiny_model_dir, tiny_data), tmp_path / "other", resume=True)
    assert "nothing to go on with in" in caplog.text


@pytest.mark.parametrize(("kind", "weight"), [("medusa", 0.0), ("eagle", 0.2)])
def test_resumed_is_uninterrupted(
    kind: str, weight: float, tiny_model_dir: Path, tiny_data: Path, tmp_path: Path
) -> None:
    whole = trainer(assembled(kind, tiny_model_dir, tiny_data, weight), tmp_path / "whole")
    whole.run()

    class Killed(BaseException):
        pass

    def kill(now: Report) -> None:
        if now.step == 6:
            raise Killed

    with pytest.raises(Killed):
        trainer(assembled(kind, tiny_model_dir, tiny_data, weight), tmp_path / "cut").run(kill)
    if weight:
        with pytest.raises(OptionError, match="another adversarial"):
            trainer(assembled(kind, tiny_model_dir, tiny_data, 0.3), tmp_path / "cut", resume=True)
    again = trainer(assembled(kind, tiny_model_dir, tiny_data, weight), tmp_path / "cut", resume=True)
    assert again.step == 4
    again.run()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    load = KINDS[kind][2].load
    ours, theirs = (load(tmp_path / name).state_dict() for name in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_processes_give_the_curve_of_one(tiny_model_dir: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Adversarially, noise and all, over gloo."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "paceline", "train", "eagle", "--model", tiny_model_dir, "--data", tiny_data, "--json"]
    command += ["--vocab", 120, "--adversarial", 0.2, "--steps", 6, "--device", "cpu", "--precision", "float32"]
    command += ["--out", tmp_path / "two"]
    command += [word for name, value in TRAIN.items() for word in (f"--{name.replace('_', '-')}", value)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    two = subprocess.Popen([sys.executable, *map(str, command)], text=True, **pipes)
    trainer(assembled("eagle", tiny_model_dir, tiny_data, 0.2), tmp_path / "one", steps=6).run()
    told, about = two.communicate()
    assert two.returncode == 0, about
    assert "; 2 processes" in about
    assert len(told.splitlines()) == 1  # one process speaks
    ours, theirs = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(ours) == len(theirs) == 7
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-3)


def test_ahead() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert ahead(values, 1, 0).tolist() == [[2, 3, 0]]
    assert ahead(values, 0, 0).tolist() == [[1, 2, 3]]
    assert ahead(values, 5, 0).tolist() == [[0, 0, 0]]
    assert ahead(values, -2, 0).tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((kind, {"layers": 0}) for kind in KINDS),
        *(("medusa", wrong) for wrong in ({"heads": 0}, {"vocab": 0}, {"objective": "x"}, {"max_length": 1})),
        *(("eagle", wrong) for wrong in ({"noise": -1.0}, {"regression": -1.0}, {"rollout": 0}, {"store_limit": 0.0})),
        *(("eagle3", wrong) for wrong in ({"noise": -1.0}, {"fading": 0.0}, {"fading": 1.5})),
    ],
)
def test_wrong_options(kind: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        KINDS[kind][1](**wrong)


def test_layers_of_another_model_have_other_features(tiny_data: Path, tmp_path: Path) -> None:
    """The same name, the same tokenizer, other weights: what is stored is not taken for theirs."""
    from tiny import byte_tokenizer

    def saved(model: LlamaForCausalLM) -> Path:
        model.float().save_pretrained(tmp_path / "m")
        byte_tokenizer().save_pretrained(tmp_path / "m")
        return tmp_path / "m"

    assembled("medusa", saved(small_llama(seed=2)), tiny_data)
    with pytest.raises(Exception, match="another revision of the model"):
        assembled("medusa", saved(small_llama(seed=3)), tiny_data)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_too_short(kind: str, tiny_model_dir: Path, tiny_data: Path) -> None:
    with pytest.raises(DataError, match="too short for this head"):
        assembled(kind, tiny_model_dir, tiny_data, max_length=2, **({"vocabulary": "own"} if kind == "medusa" else {}))
