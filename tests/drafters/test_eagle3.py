"""EAGLE-3's heads at work: on every tier what the head says of whole texts, and which head `eagle` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from drafters.test_eagle_head import noisy as first_form
from drafters.test_early_exit import Ragged
from helpers import hf_greedy, one_thread, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.auto import trained_head
from paceline.drafters.dispatch import Dispatch
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.eagle3_head import ADDED, OWN, Eagle3Config, Eagle3Head, llama_layers
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.eagle.kinds import find_eagle, take_eagle
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.merge import Merge
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import CheckpointMismatch, OptionError
from paceline.policies.fixed import Fixed
from paceline.targets import TIERS, make_target
from paceline.targets.families import embedding_matrix, output_matrix
from paceline.targets.identity import model_key, probe_features
from paceline.targets.native import NativeTarget, available
from paceline.targets.native.target import Ranked
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from targets.test_native import on_each_set
from tiny import small_llama
from told import told

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5, [9, 9]]
NEW = 12
IDS = [5, 6, 7, 8, 9, 100, 3, 200, 4]
SHALLOW = {"token": ADDED, "shallow": 1}  # tokens come in as their own states


def noisy(model: PreTrainedModel, layers: int = 1, norm_first: bool = False, **options: object) -> Eagle3Head:
    """A head with norms that are not one, which reads the states of several depths."""
    made = Eagle3Head.from_target(model, layers, **{"taps": (1, 2, 3), **options})
    config = Eagle3Config(**{**vars(made.config), "norm_first": norm_first})
    head = Eagle3Head(config, made.fingerprint, made.tokens).place(model.device, model.dtype)
    head.draw(seed=3)
    head.know(embedding_matrix(model), output_matrix(model))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


@torch.no_grad()
def states(model: PreTrainedModel, ids: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """`[1, tokens, taps * hidden]` of these taps, from Hugging Face's own forward, before its final norm."""
    target = as_target(model)
    hidden = target.prefill(list(ids), target.new_cache(1, len(ids)), taps)
    return torch.cat([hidden[tap] for tap in taps], -1)[None]


class Told(Eagle):
    """Remembers what it drafted, and behind which tokens."""

    def __init__(self, target: Target, **options: object) -> None:
        super().__init__(target, **options)
        self.told: list[tuple[list[int], TokenTree]] = []

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = super().draft(rows)
        self.told += [(list(row.ids), tree) for row, tree in zip(rows, trees, strict=True)]
        return trees


def run(target: Target, head: Eagle3Head, policy: object = None, **options: object) -> tuple[Told, list[Request]]:
    drafter = Told(target, head=head, **options)
    requests = [
        Request(prompt, limit=NEW - n, policy=policy() if callable(policy) else Fixed(k=3))
        for n, prompt in enumerate(PROMPTS)
    ]
    for _ in Engine(target, drafter).run(requests, batch=3):
        pass
    return drafter, requests


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_llama, small_neox])
@pytest.mark.parametrize("kind", [{}, SHALLOW])
@pytest.mark.parametrize("options", [{}, {"tree": 2, "budget": 5}, {"tree": 3}])
def test_output_of_ragged_batches(make: type, kind: dict[str, object], options: dict[str, object]) -> None:
    model = make()
    head = noisy(model, 2, tokens=range(200), **kind)
    _, requests = run(as_target(model), head, Ragged, extra=9, **options)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == hf_greedy(model, prompt, len(request.output))
    assert sum(request.stats.drafted for request in requests) > 20


def dispatched(target: Target, *drafters: Drafter) -> Drafter:
    return Dispatch(target, {drafter.source: drafter for drafter in drafters})


def merged(target: Target, *drafters: Drafter) -> Drafter:
    return Merge(target, drafters=drafters, budget=6)


@pytest.mark.parametrize("together", [merged, dispatched])
def test_beside_an_exit_above_what_it_reads(together: Callable[..., Drafter]) -> None:
    """It reads states that a pass from the exit layer on does not come by."""
    target = as_target(small_llama())
    exit_ = EarlyExit(target, head=ExitHead.from_target(small_llama(), 2))
    own = Eagle(target, head=noisy(small_llama()), tree=2)
    assert min(own.taps) < exit_.layers
    requests = [Request(prompt, limit=NEW, policy=Ragged()) for prompt in PROMPTS]
    for _ in Engine(target, together(target, exit_, own)).run(requests, batch=3):
        pass
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == hf_greedy(target.model, prompt, NEW)
    assert sum(request.stats.drafted for request in requests) > 0


@pytest.mark.parametrize("options", [{}, {"tree": 3, "budget": 8}])
def test_shared_layers_beside_an_exit(options: dict[str, object]) -> None:
    """They run over the slots from which the exit's own pass would go on."""
    model = small_llama()
    target, head = as_target(model), Eagle3Head.from_target(model, taps=(1, 2, 3), **SHALLOW)
    exit_ = EarlyExit(target, head=ExitHead.from_target(model, 1))
    for prompt in PROMPTS:
        request = Request(prompt, limit=40, policy=Fixed(k=4))
        for _ in Engine(target, merged(target, exit_, Eagle(target, head=head, **options))).run([request]):
            pass
        assert request.output == hf_greedy(model, prompt, 40)


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("kind", [{}, {"norm_first": True}, {"token": ADDED}, SHALLOW, {"taps": (2, 3), "shallow": 1}])
@torch.inference_mode()
def test_steps_are_the_forward_over_the_whole_text(tier: str, kind: dict[str, object]) -> None:
    """To rounding: the root's pass, with one token and with several that wait, and the step after it."""
    model, shape = small_llama().float(), {"layers": 2, "tokens": range(100, 200), **kind}
    head, target = noisy(model, **shape), make_target(small_llama().float(), tier=tier)
    ids = torch.tensor([[*IDS, 77]])
    seen, known = states(model, ids[0].tolist(), head.reads), len(IDS) - 1
    guessed = head(seen[:, : known + 1], ids[:, 1:-1])[:, -1:]
    entered = head.entered(torch.cat([head.fused(seen[:, :known]), guessed], 1), head.tokens_in(seen, ids)[:, 1:])
    following = head.decoder(inputs_embeds=entered, use_cache=False).last_hidden_state[0, -1]
    drafter = Eagle(target, head=noisy(model, **shape), extra=0)
    tolerance = {"rtol": 0, "atol": 0.2 if tier == "native" else 1e-3}
    for waiting in (1, 3, len(IDS) - 1):
        cache = target.new_cache(1, 20)
        drafter.start(cache)
        hidden = target.prefill(IDS[:-1], cache, drafter.taps)
        request = Request(IDS[:-waiting] if waiting > 1 else IDS, limit=20, policy=Fixed(k=2))
        request.slot, known = 0, len(request.ids) - 1
        drafter.begin(request, {tap: part[:known] for tap, part in hidden.items()})
        request.ids = list(IDS)
        rest = {tap: part[known:] for tap, part in hidden.items()}
        request.state.waiting.add(rest, range(len(IDS) - 1 - known))
        tree = TokenTree.root(IDS[-1])
        step = drafter.step([request], [tree], 0)
        torch.testing.assert_close(step.hidden[0], guessed[0, 0], **tolerance)
        torch.testing.assert_close(step.logits[0], head.outputs(guessed)[0, 0], **tolerance)
        tree.add(77, 0, "eagle")
        torch.testing.assert_close(drafter.step([request], [tree], 1).hidden[0], following, **tolerance)


@torch.no_grad()
def test_an_output_matrix_of_its_own() -> None:
    """Its logits are that matrix's, and tokens of the text are not added: those would have another scale."""
    model = small_llama()
    target, tokens = as_target(model), torch.arange(50, 90)
    config = Eagle3Config(taps=[3], output=OWN, target=model_key(target), model=llama_layers(model.config, 1))
    head = Eagle3Head(config, probe_features(target), tokens).place(model.device, model.dtype)
    head.draw(seed=1)
    head.know(embedding_matrix(model), output_matrix(model))
    head.matrix = torch.randn(40, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = head.matrix.clone()
    drafter, _ = run(target, head)
    assert all(50 <= token < 90 for _, tree in drafter.told for token in tree.tokens[1:])
    features = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(drafter.forward.layers.logits(features), features @ matrix.T)


# -- which head --------------------------------------------------------------------------------------------------------


def test_finds_the_newest_of_either_kind(cache_dir: Path) -> None:
    model = small_llama()
    target = as_target(model)
    with told(OptionError, "no trained EAGLE head for .*paceline train eagle"):
        find_eagle(target)
    first_form(model, 2).save(EagleHead.stored_path(target))
    assert find_eagle(target) == (EagleHead, EagleHead.stored_path(target))
    noisy(model).save(Eagle3Head.stored_path(target))
    for newer, kind in ((0, EagleHead), (10, Eagle3Head)):
        config = Eagle3Head.stored_path(target) / "eagle3.json"
        at = (EagleHead.stored_path(target) / "eagle.json").stat().st_mtime + newer - 5
        os.utime(config, (at, at))
        assert find_eagle(target)[0] is kind
    assert find_eagle(target, layers=2)[0] is EagleHead
    drafter = trained_head(target)
    assert isinstance(drafter, Eagle)
    assert drafter.taps == (1, 2, 3)
    assert drafter.folder == Eagle3Head.stored_path(target)
    assert Eagle(target, head=str(EagleHead.stored_path(target))).taps == (3,)


def test_installed_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path) -> None:
    """EAGLE-3's before the other's."""
    model = small_llama()
    target = as_target(model)
    first_form(model).save(tmp_path / "a")
    noisy(model).save(tmp_path / "b")
    monkeypatch.setattr("paceline.drafting.heads.installed", lambda _: iter([tmp_path]))
    assert find_eagle(target) == (Eagle3Head, tmp_path / "b")
    first_form(model).save(EagleHead.stored_path(target))
    assert find_eagle(target)[0] is EagleHead  # the user's own


def test_of_another_model(tmp_path: Path) -> None:
    target = as_target(small_llama(num_hidden_layers=2))
    with told(CheckpointMismatch, "EAGLE-3 head given was made for"):
        take_eagle(noisy(small_llama()), target)
    noisy(small_llama()).save(tmp_path)
    with told(CheckpointMismatch, "EAGLE-3 head in .* was made for"):
        take_eagle(tmp_path, as_target(small_llama(seed=1)))
    with told(OptionError, "has layers = 1, not 2"):
        take_eagle(tmp_path, as_target(small_llama()), layers=2)
    with told(OptionError, "extra must be >= 0"):
        Eagle(target, extra=-1)


# -- what the attention reads beside its input -------------------------------------------------------------------------


@torch.inference_mode()
def test_beside_is_the_same_at_any_width() -> None:
    """On every tier a wide layer's results are those of the module, and on the exact ones have the same bits."""
    model = small_llama().float()
    hidden, other = torch.randn(2, 1, 9, 32, generator=torch.Generator().manual_seed(0))
    for tier in TIERS:
        target = make_target(small_llama().float(), tier=tier)
        layers = Eagle(target, head=noisy(model, 2), extra=0).forward.layers
        whole = passes(layers, hidden, other, 9)
        for width in (1, 2, 4):
            parts = passes(layers, hidden, other, width)
            assert torch.equal(parts, whole) if layers.exact else torch.allclose(parts, whole, atol=1e-4)
        wide = noisy(model, 2).decoder(inputs_embeds=torch.cat([hidden, other], -1), use_cache=False).last_hidden_state
        torch.testing.assert_close(whole, wide, rtol=0, atol=0.2 if tier == "native" else 1e-4)


def passes(layers: Target, hidden: torch.Tensor, other: torch.Tensor, width: int) -> torch.Tensor:
    cache, out = layers.new_cache(1, 16), []
    for at in range(0, hidden.shape[1], width):
        piece = slice(at, at + width)
        span = Span(torch.zeros_like(hidden[:, piece, 0], dtype=torch.long), np.array([at]))
        out.append(layers.layers(hidden[:, piece], span, cache, 0, 2, beside=other[:, piece]))
    return torch.cat(out, 1)


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
@pytest.mark.parametrize("size", [72, 80])
@torch.inference_mode()
def test_beside_on_each_instruction_set(size: int) -> None:
    """The native tier's bits are the same with any width and number of threads, where rows are no whole blocks too, or
    only two together are.
    """
    model = small_llama(hidden_size=size).float()
    layers = Eagle(NativeTarget(small_llama(hidden_size=size).float()), head=noisy(model, 2), extra=0).forward.layers
    for seed in range(20, 0, -1):  # bytes that are read as floats are not always no number
        hidden, other = torch.randn(2, 1, 9, size, generator=torch.Generator().manual_seed(seed))
        assert passes(layers, hidden, other, 9).isfinite().all()
    on_each_set(lambda: passes(layers, hidden, other, 9))
    alone = passes(layers, hidden, other, 1)
    torch.set_num_threads(2)
    assert torch.equal(passes(layers, hidden, other, 9), alone)
    wide = noisy(model, 2).decoder(inputs_embeds=torch.cat([hidden, other], -1), use_cache=False).last_hidden_state
    torch.testing.assert_close(alone, wide, rtol=0, atol=0.3)


@pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")
@pytest.mark.parametrize("token", ["joined", ADDED])
@torch.inference_mode()
def test_steps_on_each_instruction_set(token: str) -> None:
    """A draft step in one call has the same bits with any width and number of threads, and near enough the model's."""
    model = small_llama(hidden_size=72).float()
    some = {"tokens": torch.arange(0, 256, 2)}  # else the target itself makes the logits
    head = first_form(model, 2, **some) if token == "joined" else noisy(model, 2, token=ADDED, **some)
    forward = Eagle(NativeTarget(small_llama(hidden_size=72).float()), head=head, extra=0, tree=4).forward
    read = torch.randn(1, 9, 72, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(40, 49)[None]

    def steps(width: int) -> torch.Tensor:
        cache, out = forward.layers.new_cache(1, 16), []
        for at in range(0, 9, width):
            piece = slice(at, at + width)
            span = Span(ids[:, piece], np.array([at]))
            made, logits, ranked = forward._run(read[:, piece], span, cache, last=span.width)
            assert logits is not None
            out.append(torch.cat([made, logits], -1))
            if forward._steps:
                assert ranked is not None
                check_ranked(logits, ranked)
        return torch.cat(out, 1)

    assert forward._steps
    on_each_set(lambda: steps(9))
    alone = steps(1)
    torch.set_num_threads(2)
    assert torch.equal(steps(9), alone)
    forward._steps = None
    torch.testing.assert_close(steps(9), alone, rtol=0, atol=0.02)


def check_ranked(logits: torch.Tensor, ranked: Ranked) -> None:
    logps, likeliest = logits.double().log_softmax(-1).topk(ranked.likeliest.shape[-1])
    assert torch.equal(ranked.likeliest, likeliest)
    torch.testing.assert_close(ranked.logps.double(), logps, rtol=1e-5, atol=1e-6)
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    torch.testing.assert_close(ranked.entropies.double(), entropies, rtol=1e-5, atol=1e-6)
