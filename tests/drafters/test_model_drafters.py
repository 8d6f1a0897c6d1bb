"""Drafters that run a model: a separate one, and the target with sublayers left out."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

import paceline
from helpers import hf_greedy, one_thread, perturbed, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.layer_skip.skip_set import KINDS, SkipSet, stored_path
from paceline.drafting.autoregressive import AutoregressiveDrafter, Step
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError, TokenizerMismatch, UnknownModel
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.policies.pace import Pace
from paceline.profiling.rounds import ready
from paceline.targets import make_target
from paceline.targets.cache import KVCache
from paceline.targets.cost_model import Costs
from paceline.targets.costs import set_costs
from paceline.targets.native import available
from paceline.targets.reference import BlockTarget, as_target
from paceline.targets.target import Target
from targets.test_families import random_ids
from tiny import EOS, LETTERS, byte_tokenizer, pair_tokenizer, small_llama, with_tokens

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5]
NEW = 12


@pytest.fixture(scope="module")
def target() -> BlockTarget:
    return BlockTarget(small_llama())


def run(
    target: Target,
    drafter: Drafter,
    policy: StoppingPolicy | None = None,
    prompts: list[list[int]] = PROMPTS,
    **options: object,
) -> list[Request]:
    requests = [Request(prompt, limit=NEW, policy=policy or Fixed(k=4), **options) for prompt in prompts]
    for _ in Engine(target, drafter).run(requests, batch=2):
        pass
    return requests


def rate(requests: list[Request]) -> float:
    return sum(r.stats.accepted for r in requests) / sum(r.stats.drafted for r in requests)


class TestDraftModel:
    def test_the_target_itself_is_always_right(self, target: BlockTarget) -> None:
        assert rate(run(target, DraftModel(target, model=target))) == 1
        assert rate(run(target, DraftModel(target, model=target), sampling=True, seed=0, verifier="rejection")) == 1

    def test_long_prompts_are_read_between_rounds(self, target: BlockTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their requests are decoded plainly meanwhile; nobody else waits."""
        monkeypatch.setattr("paceline.drafters.draft_model.PREFILL_CHUNK", 6)
        requests = run(target, DraftModel(target, model=target))
        assert [record.drafted for record in requests[2].stats.rounds[:4]] == [0, 0, 0, 4]  # 20 tokens
        assert rate(requests) == 1
        for request in requests:
            assert request.output == hf_greedy(target.model, request.ids[: request.prompt_length], NEW)

    def test_a_worse_model_is_right_less_often(self, target: BlockTarget) -> None:
        rates = [
            rate(run(target, DraftModel(target, model=BlockTarget(perturbed(small_llama(), noise)))))
            for noise in (0.02, 1.0)
        ]
        assert 1 > rates[0] > rates[1]

    def test_another_architecture(self, target: BlockTarget) -> None:
        drafter = DraftModel(target, model=as_target(small_neox()))
        for request in run(target, drafter):
            assert request.output == hf_greedy(target.model, request.ids[: request.prompt_length], NEW)

    @pytest.mark.parametrize(("ours", "theirs"), [(257, 200), (200, 257)])
    def test_padded_differently(self, ours: int, theirs: int) -> None:
        """Ids that only one of the two has are never drafted, and harmless in a prompt."""
        target, drafter = (BlockTarget(small_llama(vocab_size=v, eos_token_id=None)) for v in (ours, theirs))
        prompt = [ours - 1, 3, ours - 2]
        for sampling in (False, True):
            request = Request(prompt, limit=NEW, policy=Fixed(k=3), sampling=sampling, seed=0)
            for _ in Engine(target, DraftModel(target, model=drafter)).run([request]):
                pass
            assert len(request.output) == NEW
            if not sampling:
                assert request.output == hf_greedy(target.model, prompt, NEW)

    @pytest.mark.parametrize("tier", ["reference", "native"] if available() else ["reference"])
    def test_a_policy_beside_a_model_with_fewer_outputs(self, tier: str) -> None:
        """It is shown how sure the draft model is of the tokens that it has."""
        target, drafter = (
            make_target(small_llama(vocab_size=vocab, eos_token_id=None).float(), tier=tier) for vocab in (257, 200)
        )
        made = DraftModel(target, model=drafter)
        set_costs(made, Costs({0: 1.0, 16: 1.2}))
        request = Request([5, 6, 7], limit=NEW, policy=ready(Pace(), made), seed=0)
        for _ in Engine(target, made).run([request]):
            pass
        assert request.stats.drafted > 0

    def test_a_row_that_copies_beside_one_that_drafts(self, target: BlockTarget) -> None:
        """What the draft model has cached of a row is the row's own text."""
        model, held = BlockTarget(perturbed(small_llama(), 0.05)), dict[tuple[int, ...], torch.Tensor]()

        class Watched(DraftModel):
            def observe(self, row: Row, tree: TokenTree, path: list[int], out: object) -> None:
                super().observe(row, tree, path, out)
                length = int(self.cache.lengths[row.slot])
                held[tuple(row.ids[:length])] = self.cache.store[:, :, row.slot, :, :length].clone()

        known = {3: [5, 6, 7] * 20, 6: random_ids(60, seed=1).tolist(), 5: [8, 9] * 30}  # by the length of a draft
        requests = [Request(ids[:20], limit=40, policy=Fixed(k=k), script=ids[20:]) for k, ids in known.items()]
        for _ in Engine(target, Watched(target, model=model, copy=True)).run(requests, batch=2):
            pass
        assert len(held) > 20
        for ids, found in held.items():
            cache = model.new_cache(1, len(ids))
            model.prefill(list(ids), cache)
            torch.testing.assert_close(found, cache.store[:, :, 0])

    def test_a_text_that_the_draft_model_has_no_positions_for(self, target: BlockTarget) -> None:
        """From there on it is decoded plainly."""
        small = BlockTarget(small_llama(max_position_embeddings=40))
        request = Request([5, 6, 7] * 8, limit=60, policy=Fixed(k=3))
        for _ in Engine(target, DraftModel(target, model=small)).run([request]):
            pass
        drafted = [record.drafted for record in request.stats.rounds]
        assert drafted[0]
        assert not any(drafted[-10:])
        assert request.output == hf_greedy(target.model, request.ids[:24], 60)

    def test_needs_a_model(self, target: BlockTarget) -> None:
        with pytest.raises(OptionError, match="draft-model:model=NAME"):
            DraftModel(target)
        with pytest.raises(UnknownModel):
            DraftModel(target, model="no/such/model/anywhere")

    def test_both_need_their_tokenizers(self, tiny_model_dir: Path) -> None:
        model, mine = small_llama(), byte_tokenizer()
        assert DraftModel(as_target(model, mine), model=str(tiny_model_dir)).drafter.dtype == torch.float64
        with pytest.raises(TokenizerMismatch):
            DraftModel(as_target(model), model=str(tiny_model_dir))
        with pytest.raises(TokenizerMismatch):
            DraftModel(as_target(model, mine), model=as_target(model))


#: Of the byte tokenizer's tokens: the letters that the other tokenizer has, in its order.
LETTERS_KEPT = [at for at in range(255, -1, -1) if at % 9]
PAIRS = [(LETTERS[5], LETTERS[6]), (LETTERS[1], LETTERS[2]), (LETTERS[3], LETTERS[4])]


@pytest.fixture(scope="module")
def bytewise() -> Target:
    return as_target(small_llama(), byte_tokenizer())


@pytest.fixture(scope="module")
def finer() -> Target:
    """The same model without a ninth of its tokens."""
    tokenizer = pair_tokenizer([LETTERS[at] for at in LETTERS_KEPT], [], "</s>")
    return as_target(with_tokens(small_llama(), [*LETTERS_KEPT, 256]), tokenizer)


@pytest.fixture(scope="module")
def coarser() -> Target:
    """The same model with tokens for pairs, as which it looks upon the second of each."""
    return as_target(with_tokens(small_llama(), [*range(256), 6, 2, 4, 256]), pair_tokenizer(LETTERS, PAIRS, EOS))


class TestAnotherTokenizer:
    """The draft model is the target itself, with other tokens."""

    def test_right_where_both_have_the_token(self, bytewise: Target, finer: Target, coarser: Target) -> None:
        for other in (finer, coarser):
            requests = run(bytewise, drafter := DraftModel(bytewise, model=other))
            for request in requests:
                assert request.output == hf_greedy(bytewise.model, request.ids[: request.prompt_length], NEW)
            known = set(drafter.tokens.tolist())
            taken = [t for r in requests for t, of in zip(r.output, r.stats.sources, strict=True) if of != "target"]
            assert known.issuperset(taken)
            if other is coarser:
                assert rate(requests) == 1
            else:
                assert 0.2 < rate(requests) < 1

    @pytest.mark.parametrize("copy", [False, True])
    def test_tokens_that_are_several_of_the_draft_models(self, bytewise: Target, coarser: Target, copy: bool) -> None:
        drafter = DraftModel(coarser, model=bytewise, copy=copy)
        assert drafter.translation.of(256) == [5, 6]
        assert drafter.translation.of(259) == [256]  # the end
        for request in run(coarser, drafter, prompts=[*PROMPTS, [256, 257, 258] * 4]):
            assert request.output == hf_greedy(coarser.model, request.ids[: request.prompt_length], NEW)
            assert request.stats.accepted > 0

    def test_long_prompts_are_read_in_chunks(
        self, bytewise: Target, finer: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("paceline.drafters.draft_model.PREFILL_CHUNK", 6)
        requests = run(bytewise, DraftModel(bytewise, model=finer))
        assert [record.drafted for record in requests[2].stats.rounds[:4]] == [0, 0, 0, 4]
        for request in requests:
            assert request.output == hf_greedy(bytewise.model, request.ids[: request.prompt_length], NEW)

    def test_a_text_that_outgrows_the_draft_models_cache_is_decoded_plainly(
        self, bytewise: Target, finer: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drafter = DraftModel(bytewise, model=finer)
        monkeypatch.setattr(drafter.translation, "of", lambda token: [token % 200] * 5)
        monkeypatch.setattr("paceline.drafters.draft_model.DRAFT", 8)
        requests = run(bytewise, drafter)
        for request in requests:
            assert request.output == hf_greedy(bytewise.model, request.ids[: request.prompt_length], NEW)
        drafted = [[record.drafted for record in request.stats.rounds] for request in requests]
        assert drafted[1][0] > 0  # a prompt of one token
        assert not any(drafted[2])  # of twenty: a hundred of the draft model's

    def test_it_is_said(self, bytewise: Target, finer: Target, caplog: pytest.LogCaptureFixture) -> None:
        DraftModel(bytewise, model=finer)
        assert f"can draft {len(LETTERS_KEPT) + 1} of the target's 257 tokens" in caplog.text


class TestLayerSkip:
    def test_nothing_skipped_is_always_right(self, target: BlockTarget, tmp_path: Path) -> None:
        """The drafted keys and values stand where the target's own would."""
        SkipSet(3, (), ()).save(tmp_path / "none.json")
        drafter = LayerSkip(target, skip=str(tmp_path / "none.json"))
        assert rate(run(target, drafter)) == 1
        assert rate(run(target, drafter, sampling=True, seed=0, verifier="rejection")) == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_output_is_the_targets(self, target: BlockTarget, tmp_path: Path, kind: str) -> None:
        SkipSet(3, **{"attention": (), "mlp": (), kind: (0, 1)}).save(tmp_path / "set.json")
        requests = run(target, LayerSkip(target, skip=str(tmp_path / "set.json")))
        for request in requests:
            assert request.output == hf_greedy(target.model, request.ids[: request.prompt_length], NEW)
        assert rate(requests) < 1


class TestSkipSet:
    def test_even(self) -> None:
        for layers in range(1, 41):
            made = SkipSet.even(layers)
            edge = max(1, layers // 10)
            assert made.attention == made.mlp == tuple(sorted(set(made.mlp)))
            assert all(edge <= layer < layers - edge for layer in made.mlp)
        assert len(SkipSet.even(30).sublayers) == 24
        assert (1, "mlp") in SkipSet.even(3).sublayers

    def test_stored_and_found(self, target: BlockTarget, cache_dir: Path, tmp_path: Path) -> None:
        assert SkipSet.find(target) == SkipSet.even(3)
        made = SkipSet(3, (1,), (1, 2), {"method": "test"})
        made.save(stored_path(target))
        assert stored_path(target).is_relative_to(cache_dir)
        assert SkipSet.find(target) == LayerSkip(target).skip == made
        assert made.sublayers == {(1, "attention"), (1, "mlp"), (2, "mlp")}
        assert not list(cache_dir.rglob("*.partial"))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot read"),
            ("{", "is not a result of"),
            ("[]", "is not a result of"),
            ("[" * 100_000, "is not a result of"),
            ("9" * 5000, "is not a result of"),
            (json.dumps({"layers": "3", "attention": [1], "mlp": []}), "is not a result of"),
            (json.dumps({"layers": 3}), "is not a result of"),
            (json.dumps({"layers": 4, "attention": [], "mlp": []}), "is for 4 layers; the model has 3"),
        ],
    )
    def test_bad_files(self, target: BlockTarget, tmp_path: Path, content: str | None, message: str) -> None:
        file = tmp_path / "set.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(OptionError, match=message) as error:
            LayerSkip(target, skip=str(file))
        assert "\n" not in str(error.value)


class Counting(AutoregressiveDrafter):
    """Drafts 1, 2, 3, ...; counts its forwards."""

    source = "counting"

    def begin(self, row, hidden) -> None:
        self.steps = 0

    def step(self, rows, trees, depth):
        self.steps += 1
        return Step(torch.nn.functional.one_hot(torch.tensor([depth + 1] * len(rows)), 257) * 50.0)


class Spy(StoppingPolicy):
    """Stops where it is told to, and remembers what it was asked."""

    limit, reads_q = 5, True

    def __init__(self, more: int = 5, keep: int = 5) -> None:
        self.max_more, self.max_keep, self.asked = more, keep, []

    def more(self, depth: int) -> bool:
        self.asked.append(("more", depth))
        return depth < self.max_more

    def keep(self, q, depth: int, hidden=None) -> bool:
        assert q is not None
        assert q.sum() == pytest.approx(1)
        assert int(q.argmax()) == depth + 1
        self.asked.append(("keep", depth))
        return depth < self.max_keep


class TestAutoregressiveDrafter:
    @pytest.mark.parametrize("sampling", [False, True])
    @pytest.mark.parametrize(
        ("more", "keep", "tokens", "steps"),
        [(5, 5, 5, 5), (0, 5, 0, 0), (2, 5, 2, 2), (5, 0, 0, 1), (5, 2, 2, 3)],
    )
    def test_policy_is_asked_before_the_forward_and_before_the_draw(
        self, target: BlockTarget, sampling: bool, more: int, keep: int, tokens: int, steps: int
    ) -> None:
        drafter = Counting(target)
        policy = Spy(more, keep)
        request = Request([9, 9], limit=20, policy=policy, sampling=sampling, seed=0)
        request.slot = 0
        drafter.begin(request, {})
        [tree] = drafter.draft([request])
        assert tree.tokens == [9, *range(1, tokens + 1)]
        assert drafter.steps == steps
        assert tree.sampled == (sampling and tokens > 0)
        want = [question for depth in range(6) for question in (("more", depth), ("keep", depth))]
        assert policy.asked == want[: len(policy.asked)]

    def test_room(self, target: BlockTarget) -> None:
        drafter = Counting(target)
        for limit in (1, 2, 4):
            request = Request([9], limit=limit, policy=Spy())
            request.slot = 0
            drafter.begin(request, {})
            assert drafter.draft([request])[0].drafted == limit - 1 == drafter.steps

    def test_rows_stop_apart(self, target: BlockTarget) -> None:
        rows = [Request([9], limit=20, policy=Spy(k)) for k in (3, 0, 1)]
        drafter = Counting(target)
        for slot, row in enumerate(rows):
            row.slot = slot
            drafter.begin(row, {})
        assert [tree.drafted for tree in drafter.draft(rows)] == [3, 0, 1]
        assert drafter.steps == 3


class Sees(StoppingPolicy):
    """Drafts three, and keeps the hidden states it is shown."""

    limit, reads_hidden = 3, True

    def __init__(self) -> None:
        self.of_target, self.of_draft = [], []

    def begin_round(self, hidden) -> None:
        self.of_target.append(hidden.clone())

    def keep(self, q, depth: int, hidden=None) -> bool:
        self.of_draft.append(hidden.clone())
        return True


def last_hidden(model, ids: list[int]) -> torch.Tensor:
    """What enters the final norm at the last of `ids`, by the model's own forward."""
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0, -1]))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    hook.remove()
    return seen[0]


class TestHiddenStates:
    @pytest.mark.parametrize("kind", ["draft-model", "layer-skip"])
    def test_are_those_of_the_last_verified_and_of_the_next_drafted_position(
        self, target: BlockTarget, kind: str
    ) -> None:
        """A batch, in which one policy alone looks at them."""
        model = perturbed(small_llama(), 0.05)
        drafter = DraftModel(target, model=BlockTarget(model)) if kind == "draft-model" else LayerSkip(target)
        requests = [Request([5, 6, 7, 5], limit=12, policy=policy) for policy in (Fixed(k=2), Sees())]
        requests.append(Request([8], limit=12, policy=Sees()))
        for _ in Engine(target, drafter).run(requests):
            pass
        for request in requests[1:]:
            policy, rounds = request.policy, request.stats.rounds
            end, seen, drafted = request.prompt_length, list(policy.of_target), list(policy.of_draft)
            for record in rounds:
                if end > 1:
                    torch.testing.assert_close(seen.pop(0), last_hidden(target.model, request.ids[: end - 1]))
                of_round, drafted = drafted[: record.depth], drafted[record.depth :]
                if kind == "draft-model" and of_round:
                    torch.testing.assert_close(of_round[0], last_hidden(model, request.ids[:end]))
                elif of_round:
                    assert of_round[0].shape == (drafter.hidden_width,)
                end += record.emitted
            assert not drafted

    def test_are_not_computed_for_nobody(self, target: BlockTarget) -> None:
        """A pass taps only what is wanted."""
        tapped = []

        class Watched(BlockTarget):
            def forward(self, span, cache, taps=(), *entered):
                tapped.append(set(taps))
                return super().forward(span, cache, taps, *entered)

        watched = Watched(target.model)
        for policy, want in ((Fixed(k=2), set()), (Sees(), {watched.num_layers})):
            tapped.clear()
            for _ in Engine(watched, LayerSkip(watched)).run([Request([5, 6], limit=4, policy=policy)]):
                pass
            assert all(taps == want for taps in tapped)
            assert tapped


def test_nobody_keeps_a_cache_that_was_given_back() -> None:
    """Of a drafter that works on the target's cache, alone and beside a prediction."""
    llm = paceline.load(small_llama(), tokenizer=byte_tokenizer(), drafter="layer-skip+fixed:k=2")
    caches: list[weakref.ref[KVCache]] = []
    new_cache = llm.target.new_cache

    def watched(batch: int, capacity: int) -> KVCache:
        made = new_cache(batch, capacity)
        caches.append(weakref.ref(made))
        return made

    llm.target.new_cache = watched  # type: ignore[method-assign]
    text = llm.generate(PROMPTS[0], max_new_tokens=NEW, eos=()).tokens
    assert llm.generate(PROMPTS[0], max_new_tokens=NEW, eos=(), prediction=text).tokens == text
    assert len(caches) > 1
    gc.collect()
    assert not [cache for cache in caches if cache() is not None]
