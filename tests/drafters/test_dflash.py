"""The DFlash drafter: what its head computes, what it reads round by round, chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DFlashCache

from drafters.test_medusa import Ragged
from helpers import hf_greedy, one_thread, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafters.dflash.drafter import DFlash
from paceline.drafters.dflash.head import DFlashHead, spread_taps
from paceline.drafting.base import Row
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.base import StoppingPolicy
from paceline.policies.fixed import Fixed
from paceline.targets import make_target
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from tiny import small_llama

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5, [9, 9]]
NEW = 14
BLOCK = 5
MODELS = {"llama": small_llama, "gpt_neox": small_neox}


@torch.no_grad()
def noisy(model: PreTrainedModel, **options: Any) -> DFlashHead:
    head = DFlashHead.from_target(model, **{"layers": 2, "block": BLOCK, "taps": (1, 3), **options})
    generator = torch.Generator().manual_seed(2)
    for weight in head.parameters():
        weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


@torch.no_grad()
def states(target: Target, head: DFlashHead, ids: Sequence[int]) -> Tensor:
    """`[1, tokens, taps*hidden]` of a whole text."""
    span, cache = Span(torch.tensor([list(ids)]), np.zeros(1, dtype=np.int64)), target.new_cache(1, len(ids))
    hidden, found = target.embed(span), [target.embed(span)]
    for layer in range(target.num_layers):
        hidden = target.layers(hidden, span, cache, layer, layer + 1)
        found.append(hidden.clone())
    return torch.cat([found[tap] for tap in head.config.taps], -1)


@torch.no_grad()
def logits(target: Target, head: DFlashHead, ids: Sequence[int], block: int = BLOCK) -> Tensor:
    """`[places, vocab]`: what `DFlashHead.forward` says comes after a text."""
    before = len(ids) - 1
    given = torch.tensor([[ids[-1], *[head.config.mask] * (block - 1)]])
    positions, at = torch.arange(before + block)[None], before + torch.arange(block)[:, None]
    read = states(target, head, ids[:-1]) if before else given.new_zeros(1, 0, head.fc.in_features, dtype=target.dtype)
    known, hidden = head.known(read), target.embed(Span(given, np.zeros(1, dtype=np.int64)))
    kinds = zip(head.config.causal or [False] * 2, head.config.windows or [0] * 2, head.layers, strict=True)
    for causal, window, layer in kinds:
        seen = torch.ones(1, 1, block, before + block, dtype=torch.bool)
        if causal:
            seen = seen & (positions <= at)
        if window:
            seen = seen & (positions > at - window)
        hidden = layer(hidden, known, head.rotary(hidden, positions), seen)
    return head.outputs(head.norm(hidden))[0, 0 if head.config.from_known else 1 :]


class ToldDFlash(DFlash):
    """Keeps what it drafted, with what it drafted from."""

    def __init__(self, target: Target, **options: Any) -> None:
        super().__init__(target, **options)
        self.told: list[tuple[list[int], TokenTree]] = []

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = super().draft(rows)
        self.told += [(list(row.ids), tree) for row, tree in zip(rows, trees, strict=True)]
        return trees


def run(target: Target, drafter: DFlash, policy: Callable[[], StoppingPolicy], **options: Any) -> list[Request]:
    requests = [Request(prompt, limit=NEW - n, policy=policy(), **options) for n, prompt in enumerate(PROMPTS)]
    for _ in Engine(target, drafter).run(requests, batch=3):
        pass
    return requests


# -- what the head computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, BLOCK])
@torch.no_grad()
def test_it_computes_what_transformers_assistants_do(window: int | None) -> None:
    from transformers.models.muse_glimmer_assistant import configuration_muse_glimmer_assistant as configuration
    from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as modeling

    model = small_llama().float()
    head = noisy(model)
    shape = {**head.config.shape, "num_hidden_layers": 2, "vocab_size": 257, "target_layer_ids": [0, 2]}
    config = configuration.MuseGlimmerAssistantConfig(
        **shape,
        block_size=BLOCK,
        mask_token_id=256,
        layer_types=["sliding_attention" if window else "full_attention"] * 2,
        sliding_window=window or 99,
    )
    if window:  # as they are read: transformers' windows have one token more
        head.config = replace(head.config, causal=[False] * 2, windows=[window + 1] * 2)
    theirs = modeling.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    ours = {
        next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name): weight
        for name, weight in head.state_dict().items()
    }
    theirs.load_state_dict(ours)
    ids = [3, 4, 5, 6, 7, 8, 9]
    known = states(as_target(model), head, ids[:-1])
    given = torch.tensor([[ids[-1], *[256] * (BLOCK - 1)]])
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(ids) - 1)
    said = theirs(
        noise_embeds=model.get_input_embeddings()(given),
        context_hidden_states=known,
        position_ids=torch.arange(len(ids) - 1 + BLOCK)[None],
        past_key_values=cache,
    ).last_hidden_state
    want = model.get_output_embeddings()(said)[0, 1:]
    torch.testing.assert_close(logits(as_target(model), head, ids), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", range(1, 40))
def test_states_to_read(layers: int) -> None:
    taps = spread_taps(layers)
    assert 1 <= len(taps) <= 5
    assert taps == sorted(set(taps))
    assert 1 <= taps[0] <= taps[-1] <= layers
    if layers == 28:
        assert [tap - 1 for tap in taps] == [1, 7, 13, 19, 25]
        assert [tap - 1 for tap in spread_taps(28, 3)] == [1, 13, 25]
        assert spread_taps(28, 1) == [15]


# -- what it drafts ------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"from_known": True},
    {"causal": [True, True], "windows": [0, 0]},
    {"causal": [False, False], "windows": [6, 6]},
    {"causal": [True, True], "windows": [3, 3]},
    {"causal": [True, False], "windows": [4, 0]},
    {"taps": [3, 1]},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_from_all_of_the_text(name: str, kind: dict[str, Any]) -> None:
    """In every round of every request, by turns joining, leaving and changing rows."""
    model = MODELS[name]()
    head = noisy(model, tokens=None if kind else range(0, 256, 2))
    head.config = replace(head.config, **kind)
    target = as_target(model)
    drafter = ToldDFlash(target, head=head)
    assert drafter.longest == (BLOCK if head.config.from_known else BLOCK - 1)
    for request in run(target, drafter, Ragged):
        assert request.output == hf_greedy(model, request.ids[: request.prompt_length], len(request.output))
    drafted = 0
    for ids, tree in drafter.told:
        if tree.drafted:
            best = logits(target, head, ids).argmax(-1)[: tree.drafted]
            assert tree.tokens[1:] == (best if head.tokens is None else head.tokens[best]).tolist()
            drafted += tree.drafted
    assert drafted > 10


def with_changes(plain: DFlashHead, model: PreTrainedModel, **change: Any) -> DFlashHead:
    """A head of another configuration with the same weights."""
    head = DFlashHead(replace(plain.config, **change), plain.fingerprint)
    head.load_state_dict(plain.state_dict(), strict=False)
    head = head.place(model.device, model.dtype)
    head.know(plain.embedding, plain.matrix)
    return head


def drafts_as_computed(model: PreTrainedModel, head: DFlashHead) -> None:
    target = as_target(model)
    drafter = ToldDFlash(target, head=head)
    run(target, drafter, lambda: Fixed(k=4))
    for ids, tree in drafter.told:
        best = logits(target, head, ids).argmax(-1)[: tree.drafted]
        assert tree.tokens[1:] == (best if head.tokens is None else head.tokens[best]).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_output_matrix_of_its_own(dtype: torch.dtype) -> None:
    """In whatever type it was stored."""
    model = small_llama()
    head = noisy(model, tokens=range(50))
    head.config, head.matrix = replace(head.config, output="own"), -head.matrix.to(dtype)
    drafts_as_computed(model, head)


@torch.no_grad()
def test_biases() -> None:
    model = small_llama()
    head = with_changes(noisy(model), model, bias=True)
    biases = [part for name, part in head.named_parameters() if name.endswith("bias")]
    assert len(biases) == 8
    for index, bias in enumerate(biases):
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(index)))
    drafts_as_computed(model, head)


def test_positions_that_are_scaled() -> None:
    model = small_llama()
    plain = noisy(model)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    drafts_as_computed(model, with_changes(plain, model, shape=plain.config.shape | {"rope_parameters": rope}))


def test_what_is_not_asked_for_long_is_read() -> None:
    """And no more of it waits than a few rounds."""
    model = small_llama(max_position_embeddings=600)
    target, head = as_target(model), noisy(model)
    drafter, waiting = ToldDFlash(target, head=head), []

    class Seldom(StoppingPolicy):
        limit = 4

        def more(self, depth: int) -> bool:
            waiting.append(len(request.state.waiting))
            return len(request.ids) > 150

    request = Request([5, 6, 7, 8], limit=160, policy=Seldom())
    for _ in Engine(target, drafter).run([request]):
        pass
    assert request.output == hf_greedy(model, [5, 6, 7, 8], 160)
    assert 50 < max(waiting) < 64
    drafted = [(ids, tree) for ids, tree in drafter.told if tree.drafted]
    assert drafted
    for ids, tree in drafted:
        assert tree.tokens[1:] == logits(target, head, ids).argmax(-1)[: tree.drafted].tolist()


def test_a_shorter_block() -> None:
    """Is a block of its own, with fewer masks."""
    model = small_llama()
    target, head = as_target(model), noisy(model)
    drafter = ToldDFlash(target, head=head, block=3)
    assert drafter.longest == 2
    run(target, drafter, lambda: Fixed(k=4))
    for ids, tree in drafter.told:
        assert tree.tokens[1:] == logits(target, head, ids, 3).argmax(-1)[: tree.drafted].tolist()


def test_trees_have_the_likeliest_paths() -> None:
    model = small_llama()
    target, head = as_target(model), noisy(model)
    drafter = ToldDFlash(target, head=head, tree="dynamic", budget=7)
    for request in run(target, drafter, lambda: Fixed(k=3)):
        assert request.output == hf_greedy(model, request.ids[: request.prompt_length], len(request.output))
    wide = 0
    for ids, tree in drafter.told:
        chances = logits(target, head, ids).softmax(-1)
        for node in range(1, len(tree)):
            path = tree.path(node)[1:]
            product = float(torch.stack([chances[i, tree.tokens[at]] for i, at in enumerate(path)]).prod())
            assert tree.scores[node] == pytest.approx(product, rel=1e-4)
        wide += tree.drafted > tree.depth
    assert wide > 5


@pytest.mark.parametrize("tier", ["torch", "native"])
def test_on_the_fast_tiers(tier: str) -> None:
    """The same numbers, on the native tier up to what rounding them takes."""
    model = small_llama().float()
    head = noisy(model, tokens=range(0, 256, 2))
    ids = [3, 4, 5, 6, 7, 8, 9]
    want = logits(as_target(small_llama().float()), head, ids)
    target = make_target(small_llama().float(), tier=tier)
    drafter = DFlash(target, head=head)
    request = Request(ids, limit=9, policy=Fixed(k=4))
    with torch.inference_mode():
        drafter.start(target.new_cache(1, 64))
        read = states(target, head, ids[:-1])[0]
        request.row, given = 0, dict(zip(head.config.taps, read.chunk(2, -1), strict=True))
        drafter.begin(request, given)
        got = drafter.guess([request]).logits[0]
    off = (got - want).norm() / want.norm()
    assert off < (0.05 if tier == "native" else 1e-4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"block": 1}, "2 .. 5 tokens, not 1"),
        ({"block": 6}, "2 .. 5 tokens, not 6"),
        ({"tree": "static"}, "tree is chain, dynamic, not 'static'"),
        ({"tree": "dynamic", "copy": True}, "trees do not"),
        ({"budget": 0}, "budget"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    model = small_llama()
    with pytest.raises(OptionError, match=told):
        DFlash(as_target(model), head=noisy(model), **options)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"layers": 0}, {"block": 1}, {"block": 65}, {"taps": (4,)}),
        *({"mask": 257}, {"mask": -1}, {"inner": 0}, {"tokens": []}),
    ],
)
def test_wrong_heads(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        noisy(small_llama(), **wrong)
