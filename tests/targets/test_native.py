"""The native tier: Hugging Face's logits, the same bits at any width, exact storage, and the build."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import paceline
from paceline.drafters.draft_model import DraftModel
from paceline.drafting.tree import tree_span
from paceline.errors import NativeUnavailable, OptionError, UnsupportedModel
from paceline.policies import POLICIES
from paceline.targets import sources
from paceline.targets.native import NativeTarget, available, build, compiler
from paceline.targets.native.linear import RoundedLinear
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.storage import Storage
from paceline.targets.native.weights import Kind, Packed, Rows
from paceline.targets.parts import Norm
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.target import Target
from targets.test_families import bushy
from tiny import byte_tokenizer, small_llama
from tiny_gguf import write_gguf
from told import told

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")

CONTEXT = 400  # more than three of attention's chunks
SIZES = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "one key/value head": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"hidden_size": 70, "num_attention_heads": 14, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "biases, tied": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"num_key_value_heads": 6}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 40}),
}


def make(family: str) -> hf.PreTrainedModel:
    model, config, fields = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(config(**(SIZES | fields)))
        for weight in made.parameters():  # biases and norms start as 0 and 1, where a mistake cannot be seen
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    return made.eval()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[NativeTarget, Target]:
    return NativeTarget(make(request.param)), as_target(make(request.param))


@pytest.fixture(scope="module")
def llama() -> NativeTarget:
    return NativeTarget(make("llama"))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(seed))


def chunked(target: Target, ids: Tensor, width: int) -> Tensor:
    """Logits `[tokens, vocab]`, computed `width` tokens at a time."""
    cache, logits = target.new_cache(1, len(ids)), []
    for some in ids.split(width):
        logits.append(target.forward(Span(some[None], cache.lengths.copy()), cache).logits[0])
        cache.commit([range(len(some))])
    return torch.cat(logits)


# -- what it computes --------------------------------------------------------------------------------------------------
def test_is_hugging_face(pair: tuple[NativeTarget, Target]) -> None:
    native, reference = pair
    ids = random_ids(1, 300)
    want = reference.model(ids).logits[0]
    torch.testing.assert_close(chunked(native, ids[0], 300), want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("batch", [1, 3])
def test_block_view(pair: tuple[NativeTarget, Target], batch: int) -> None:
    """Taps, ranges of layers and skipped sublayers, over rows of different lengths."""
    native, reference = pair
    starts = np.array([5, 0, 140][:batch])
    skip = {(0, "mlp"), (1, "attention"), (2, "attention"), (2, "mlp")}
    results = []
    for target in (native, reference):
        cache = target.new_cache(batch, 150)
        cache.store.copy_(torch.randn(cache.store.shape, generator=torch.Generator().manual_seed(1)))
        span = Span(random_ids(batch, 4), starts)
        out = target.forward(span, cache, taps=(0, 2, 3))
        left_out = target.layers(out.taps[0], span, cache, 0, 3, skip)
        results.append([*out.taps.values(), out.logits, left_out, cache.store])
        assert torch.equal(out.taps[0], target.embed(span)), "a tap was overwritten"
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# -- the same bits -----------------------------------------------------------------------------------------------------
def test_any_width_and_threads_give_the_same_bits(pair: tuple[NativeTarget, Target], threads: None) -> None:
    """Widths on both sides of every boundary in the GEMM and in attention."""
    native, _ = pair
    ids = random_ids(300)
    torch.set_num_threads(1)
    want = chunked(native, ids, 1)
    for count, width in [(2, 1), (2, 2), (1, 3), (2, 5), (1, 6), (2, 7), (2, 13), (1, 97), (2, 128), (2, 300)]:
        torch.set_num_threads(count)
        assert torch.equal(chunked(native, ids, width), want), f"width {width}, {count} threads"


@pytest.mark.parametrize("length", [0, 17, 125, 256])
def test_a_path_through_a_tree_is_a_chain(pair: tuple[NativeTarget, Target], length: int) -> None:
    native, _ = pair
    tree, context = bushy(), random_ids(length)
    cache = native.new_cache(1, length + 16)
    native.prefill(context.tolist(), cache)
    logits = native.forward(tree_span([tree], cache.lengths, native.device), cache).logits[0]
    for node in range(len(tree)):
        path = torch.tensor([tree.tokens[n] for n in tree.path(node)])
        assert torch.equal(logits[node], chunked(native, torch.cat([context, path]), 1)[-1])
    path = torch.tensor([tree.tokens[n] for n in tree.path(7)])
    cache.commit([tree.path(7)])
    after = native.forward(Span(torch.tensor([[3]]), cache.lengths.copy()), cache).logits[0, 0]
    assert torch.equal(after, chunked(native, torch.cat([context, path, torch.tensor([3])]), 5)[-1])


def test_a_prompt_leaves_what_a_pass_does(pair: tuple[NativeTarget, Target]) -> None:
    """Whether or not somebody reads what leaves the last layer, which is not computed else."""
    native, _ = pair
    ids, layers, stores = random_ids(70), native.num_layers, []
    for taps in [(), (0, layers - 1), (layers,)]:
        cache = native.new_cache(1, 80)
        tapped = native.prefill(ids.tolist(), cache, taps, chunk=50)
        whole = native.new_cache(1, 80)
        out = native.forward(Span(ids[None], np.zeros(1, np.int64)), whole, taps)
        for tap in taps:
            assert torch.equal(tapped[tap], out.taps[tap][0])
        stores += [cache.store, whole.store]
    for store in stores:
        assert torch.equal(store, stores[0])


def test_a_row_of_a_batch_is_alone(llama: NativeTarget) -> None:
    contexts = [random_ids(length, seed=length) for length in (3, 150, 40)]
    batch = llama.new_cache(3, 160)
    for row, context in enumerate(contexts):
        llama.prefill(context.tolist(), batch.rows(row, row + 1))
    ids = random_ids(3, 5)
    logits = llama.forward(Span(ids, batch.lengths.copy()), batch).logits
    for row, context in enumerate(contexts):
        assert torch.equal(logits[row], chunked(llama, torch.cat([context, ids[row]]), 1)[-5:])


# -- the same bits on every instruction set ----------------------------------------------------------------------------
def on_each_set(run: Callable[[], Tensor], own: Collection[str] = ()) -> None:
    """What `run` returns has the same bits on all instruction sets of this machine, but on those with their `own`."""
    before, results = build.instruction_set(), {}
    try:
        for name in build.runnable():
            build.choose(name)
            result = run().view(torch.int32)
            if name not in own:
                results[name] = result
    finally:
        build.choose(before)
    first = next(iter(results.values()))
    for name, result in results.items():
        assert torch.equal(result, first), f"{name} differs from {next(iter(results))}"


def test_the_fastest_set_is_taken() -> None:
    assert build.instruction_set() == build.runnable()[-1]


def test_every_width_on_each_set(pair: tuple[NativeTarget, Target]) -> None:
    """Chunked prompts, then passes of 1 to 64 tokens behind them, on both sides of a boundary of attention's chunks."""
    native, _ = pair
    ids = random_ids(230)

    def run() -> Tensor:
        cache, logits = native.new_cache(1, 240), [chunked(native, ids, 37)]
        native.prefill(ids[:120].tolist(), cache)
        for width in range(1, 65):
            logits.append(native.forward(Span(ids[None, 120 : 120 + width], cache.lengths.copy()), cache).logits[0])
        return torch.cat([*logits, cache.store.flatten()[: 131 * 100].view(-1, 131)])

    on_each_set(run)


@pytest.mark.parametrize("length", [0, 61, 125, 256])
def test_trees_on_each_set(pair: tuple[NativeTarget, Target], length: int) -> None:
    native, _ = pair
    tree, context = bushy(), random_ids(length).tolist()

    def run() -> Tensor:
        cache = native.new_cache(1, length + 16)
        native.prefill(context, cache)
        return native.forward(tree_span([tree], cache.lengths, native.device), cache).logits

    on_each_set(run)


def test_ragged_batches_on_each_set(llama: NativeTarget) -> None:
    contexts = [random_ids(length, seed=length).tolist() for length in (3, 150, 40, 129)]

    def run() -> Tensor:
        batch, logits = llama.new_cache(4, 180), []
        for row, context in enumerate(contexts):
            llama.prefill(context, batch.rows(row, row + 1))
        for width in (1, 2, 5, 16, 25):
            span = Span(random_ids(4, width), batch.lengths.copy())
            logits.append(llama.forward(span, batch).logits.flatten(0, 1))
        return torch.cat(logits)

    on_each_set(run)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("inputs", [32, 320])
def test_storages_on_each_set(kind: Kind, inputs: int) -> None:
    """150 outputs: the last panels are fewer than a tile's."""
    floats = torch.randn(150, inputs, generator=torch.Generator().manual_seed(0))
    whole = {Kind.F32: floats, Kind.BF16: floats.bfloat16()}
    model = head(Rows.of(whole[kind]) if kind in whole else quantised(kind, 150, inputs)[0])
    hidden = torch.randn(200, inputs, generator=torch.Generator().manual_seed(1))
    on_each_set(lambda: torch.cat([model.head(hidden[:tokens]) for tokens in (*range(1, 65), 97, 200)]))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_blocks_of_any_scale_on_each_set(kind: Kind) -> None:
    """Random bits, all finite scales and minima: unpacked as gguf does it, and multiplied alike."""
    name, draw = gguf.GGMLQuantizationType[kind.name], np.random.default_rng(0)
    raw = draw.integers(0, 256, (600, 10 * gguf.GGML_QUANT_SIZES[name][1]), dtype=np.uint8)
    halves = raw.reshape(6000, -1)[:, : 4 if kind == Kind.Q4_1 else 2].view(np.uint16)
    halves[halves & 0x7C00 == 0x7C00] &= 0x83FF  # infinities become subnormal
    plain = torch.from_numpy(gguf.quants.dequantize(raw, name))
    model = head(Rows(kind, 320, torch.from_numpy(raw)))
    hidden = torch.randn(40, 320, generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        unpacked = model.matrices[-1].rows(torch.arange(600))
        assert torch.equal(unpacked, plain)
        return torch.cat([unpacked.flatten(), model.head(hidden).flatten(), model.head(hidden[:1]).flatten()])

    on_each_set(run)


def test_the_machines_speed_on_each_set() -> None:
    """The loops that the roofline is measured by; wider vectors are never much slower."""
    numbers, before, peaks = torch.ones(1 << 20), build.instruction_set(), []
    try:
        for name in build.runnable():
            build.choose(name)
            peaks.append(max(build.library().paceline_peak(1, 0) for _ in range(5)))
            assert build.library().paceline_bandwidth(numbers.data_ptr(), len(numbers), 2) > 1e8
    finally:
        build.choose(before)
    assert peaks[-1] > 0.5 * max(peaks) > 1e7


# -- memory ------------------------------------------------------------------------------------------------------------
def memory(of: int) -> int:
    """Bytes of this process that Linux tells: addresses (0), or what is there of them (1)."""
    return int(Path("/proc/self/statm").read_text().split()[of]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_attention_of_a_long_context_takes_bounded_memory(threads: None) -> None:
    """A narrow pass goes through it in turns; with one thread it is a wide one. Both have the same bits, with windows
    and with rows that end, or begin, in any turn.
    """
    heads = {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 2}
    fields = SIZES | heads | {"hidden_size": 64, "max_position_embeddings": 5200}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = NativeTarget(hf.LlamaForCausalLM(hf.LlamaConfig(**fields)))
    lengths, ids, grown = np.array([5000, 4990, 700]), random_ids(3, 21), []
    cache = target.new_cache(3, 5100)
    cache.store.normal_(generator=torch.Generator().manual_seed(0))
    target.windows = [0, 300, 2100]

    def run() -> Tensor:
        before = memory(1)
        logits = target.forward(Span(ids, lengths), cache).logits
        grown.append(memory(1) - before)
        return logits

    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(count,)) as pool:  # has no memory yet
            results.append(pool.submit(run).result())
    assert torch.equal(*results)
    assert max(grown) < 90 << 20  # of 120 for all of it


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_pass_without_memory_is_an_error(llama: NativeTarget) -> None:
    """And the next one runs."""
    import resource

    long, cache = 100_000, llama.new_cache(1, 100_000)
    hidden, span = torch.zeros(1, long, 60), Span(torch.zeros(1, long, dtype=torch.int64), np.zeros(1, np.int64))
    with ThreadPoolExecutor(1) as pool:  # a thread whose memory is small
        usual = pool.submit(chunked, llama, random_ids(20), 5).result()
        before, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory(0) + (80 << 20), most))
        try:
            with told(MemoryError, "no memory left for this pass"):
                pool.submit(llama.layers, hidden, span, cache, 0, 3).result()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (before, most))
        assert torch.equal(pool.submit(chunked, llama, random_ids(20), 5).result(), usual)


# -- storage -----------------------------------------------------------------------------------------------------------
def quantised(kind: Kind, outputs: int, inputs: int) -> tuple[Rows, Tensor]:
    """Random blocks, and the floats that gguf makes of them."""
    weight = np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)
    weight[0] = 0
    weight[1] *= 1e-7  # a scale that is subnormal in half precision
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind.name])
    plain = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    return Rows(kind, inputs, torch.from_numpy(raw)), torch.from_numpy(plain)


def head(rows: Rows) -> NativeModel:
    """A model that is a head alone."""
    packed = Packed(rows.kind, rows.inputs, [len(rows.data)])
    packed.write(rows.data, packed.places(0))
    return NativeModel(Sizes(rows.inputs), [], Norm(torch.ones(rows.inputs), None, 1e-6), packed)


@pytest.mark.parametrize("inputs", [32, 608])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_blocks_give_the_bits_of_their_floats(kind: Kind, inputs: int) -> None:
    rows, plain = quantised(kind, 150, inputs)
    blocks, floats = head(rows), head(Rows.of(plain))
    assert torch.equal(blocks.matrices[-1].rows(torch.arange(150)), plain)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 12, 13, 100):
        hidden = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(blocks.head(hidden), floats.head(hidden))


@pytest.mark.parametrize("near", [True, False])
def test_digits_are_lifted_where_that_is_exact(near: bool) -> None:
    """A minimum that is a millionth of its scale would lose bits beside the lifted scale; either way the bits are those
    of the blocks' floats.
    """
    (_, inputs, raw), _ = quantised(Kind.Q4_1, 48, 64)
    fields = raw.numpy().reshape(-1, 20)[:, :4].view(np.float16)  # of each block: scale, minimum
    if not near:
        fields[7] = 1.0, -1.001e-6
    plain = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.Q4_1))
    model, floats = head(Rows(Kind.Q4_1, inputs, raw)), head(Rows.of(plain))
    assert [bool(matrix.c.near) for matrix in model.matrices] == [near]
    hidden = torch.randn(20, inputs, generator=torch.Generator().manual_seed(1))
    for tokens in (1, 5, 20):
        assert torch.equal(model.head(hidden[:tokens]), floats.head(hidden[:tokens]))


@pytest.mark.parametrize("inputs", [31, 600])
def test_bfloat16_gives_the_bits_of_its_floats(inputs: int) -> None:
    weight = torch.randn(75, inputs).bfloat16()
    small, floats = head(Rows.of(weight)), head(Rows.of(weight.float()))
    assert small.matrices[-1].bytes * 2 == floats.matrices[-1].bytes
    for tokens in (1, 2, 5, 6, 7, 100):
        hidden = torch.randn(tokens, inputs)
        assert torch.equal(small.head(hidden), floats.head(hidden))


def kinds(target: NativeTarget) -> set[Kind]:
    return {matrix.kind for matrix in target.native.matrices}


def test_bfloat16_is_chosen_where_it_is_exact(llama: NativeTarget) -> None:
    rounded = make("llama").bfloat16().float()
    assert kinds(llama) == {Kind.F32}
    assert kinds(NativeTarget(rounded)) == {Kind.BF16}
    ids, rounded = random_ids(20), make("llama").bfloat16().float()
    assert torch.equal(
        chunked(NativeTarget(rounded, storage="fp32"), ids, 7),
        chunked(NativeTarget(make("llama").bfloat16().float()), ids, 7),
    )


def test_the_blocks_of_a_gguf_file(tmp_path: Path, cache_dir: Path) -> None:
    """Taken where they are the checkpoint's weights, and only there."""
    write_gguf(tmp_path / "tiny.gguf")
    ids, targets = random_ids(40), []
    for storage in ("auto", "blocks", "fp32"):
        model, tokenizer = sources.load_model(str(tmp_path / "tiny.gguf"), progress=False)
        if storage == "blocks":
            model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1e-3
            model.model.layers[1].mlp.down_proj.weight.data[3, 5] -= 2e-3
        targets.append(NativeTarget(model, tokenizer, storage))
    exact, changed, floats = targets
    assert kinds(exact) == {Kind.Q4_1, Kind.Q8_0}
    assert [matrix.kind for matrix in changed.native.matrices[:-1]] == [Kind.Q4_1] * 7 + [Kind.F32]
    assert torch.equal(chunked(exact, ids, 3), chunked(floats, ids, 11))
    assert sum(matrix.bytes for matrix in exact.native.matrices) < sum(m.bytes for m in floats.native.matrices) / 4


def test_blocks_are_read_in_pieces(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: the rows of a head, which lie in another order in the file, may be in several."""
    write_gguf(tmp_path / "tiny.gguf")
    for rows in (7, 16, 100):
        monkeypatch.setattr("paceline.targets.native.storage.SOME", rows)
        model, tokenizer = sources.load_model(str(tmp_path / "tiny.gguf"), progress=False)
        assert kinds(NativeTarget(model, tokenizer, "blocks")) == {Kind.Q4_1, Kind.Q8_0}


@pytest.mark.parametrize(
    ("hidden", "kind", "kinds", "near"),
    [
        (64, Kind.Q8_0, {Kind.Q8_0}, 0.05),
        (64, Kind.Q4_1, {Kind.Q4_1, Kind.Q8_0}, 0.6),  # 0.07 of each weight, in random layers
        (56, Kind.Q8_0, {Kind.F32}, 0.05),
    ],
)
def test_rounded(hidden: int, kind: Kind, kinds: set[Kind], near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the model, where its rows are made of whole blocks; elsewhere the model itself."""
    monkeypatch.setattr("paceline.targets.native.storage.ROUNDED", kind)
    size = {"hidden_size": hidden, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    size["tie_word_embeddings"] = False
    ids = random_ids(20)
    model = NativeTarget(small_llama(**size).float())
    rounded = NativeTarget(small_llama(**size).float(), storage="rounded")
    assert {matrix.kind for matrix in rounded.native.matrices if matrix.c.inputs == hidden} == kinds
    want, got = chunked(model, ids, 20), chunked(rounded, ids, 20)
    error = float((got - want).std() / want.std())
    assert 0 < error < near  # the MLP's second matrix has whole blocks in both cases


def test_storage_that_cannot_be(tmp_path: Path) -> None:
    for storage, words in (("int3", "there are auto"), ("blocks", "come from a GGUF file")):
        with pytest.raises(OptionError, match=words):
            Storage(storage, None, 1, {})


def test_unsupported_models() -> None:
    for model, words in (
        (small_llama(), "float64"),
        (small_llama(hidden_act="relu6").float(), "relu6"),
        (small_llama(head_dim=258).float(), "258"),
        (hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=4, n_layer=1)), "gpt2"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            NativeTarget(model)


def test_what_lies_outside(llama: NativeTarget) -> None:
    cache = llama.new_cache(1, 4)
    for ids in ([131], [-1], [0] * 5):
        with pytest.raises(IndexError):
            llama.forward(Span(torch.tensor([ids]), cache.lengths.copy()), cache)


def test_no_tokens(llama: NativeTarget) -> None:
    """Are no error: an empty batch has empty logits."""
    for hidden in (torch.empty(0, 60), torch.empty(2, 0, 60)):
        for made in (llama.head(hidden), llama.logits(hidden)):
            assert made.shape == (*hidden.shape[:-1], 131)
    assert RoundedLinear(torch.randn(51, 64))(torch.empty(0, 64)).shape == (0, 51)
    cache = llama.new_cache(1, 8)
    span = Span(torch.empty(1, 0, dtype=torch.int64), cache.lengths.copy())
    assert llama.forward(span, cache).logits.shape == (1, 0, 131)
    assert llama.forward_greedy(span, cache).likeliest.shape == (1, 0)


def test_a_pass_is_its_parts(pair: tuple[NativeTarget, Target]) -> None:
    """In one call the same bits as by parts: a tree in a batch, with what enters any layer, and from any layer on."""
    target, ids = pair[0], random_ids(2, 7)
    tree = torch.eye(7, dtype=torch.bool) | (torch.arange(7) == 0)
    depths = torch.tensor([[0, 1, 1, 1, 1, 1, 1]] * 2)
    span = Span(ids, np.array([3, 0]), depths=depths, ancestors=torch.stack([tree, tree]))
    cache = target.new_cache(2, 12)
    entering = [target.embed(span)]
    for layer in range(3):
        entering.append(target.layers(entering[-1], span, cache, layer, layer + 1))
    logits = target.head(entering[-1])
    for start in range(4):
        out = target.forward(span, cache, range(start, 4), start, entering[start] if start else None)
        assert torch.equal(out.logits, logits)
        assert all(torch.equal(out.taps[tap], entering[tap]) for tap in range(start, 4))
        assert out.likeliest is not None
        assert torch.equal(out.likeliest, logits.argmax(-1))
    with pytest.raises(ValueError, match="cannot tap"):
        target.forward(span, cache, [1], 2, entering[2])


def test_the_first_of_equals_is_the_likeliest() -> None:
    """As numpy and torch have it, on each instruction set, in a vocabulary that is no whole number of pieces."""
    model = small_llama(vocab_size=1131).float()
    weight = model.lm_head.weight.data
    weight[:] = weight[torch.randint(0, 3, (1131,), generator=torch.Generator().manual_seed(0))]
    target = NativeTarget(model)
    cache, span = target.new_cache(1, 9), Span(random_ids(1, 9), np.zeros(1, np.int64))

    def likeliest() -> Tensor:
        out = target.forward(span, cache)
        assert out.likeliest is not None
        assert out.likeliest.tolist() == out.logits.numpy().argmax(-1).tolist()
        return out.likeliest

    on_each_set(likeliest)


# -- the build ---------------------------------------------------------------------------------------------------------
CHECK = """
import torch
from paceline.targets.native import NativeTarget
from paceline.targets.span import Span
from tiny import byte_tokenizer, small_llama
model, ids = small_llama().float(), torch.arange(200)[None]
with torch.inference_mode():
    want = model(ids).logits
    target = NativeTarget(model)
    cache = target.new_cache(1, 200)
    torch.testing.assert_close(target.forward(Span(ids, cache.lengths), cache).logits, want, rtol=1e-4, atol=1e-4)
    last = target.forward(Span(ids[:, -1:], cache.lengths + 199), cache).logits[0, 0]
    assert torch.equal(last, target.forward(Span(ids, cache.lengths), cache).logits[0, -1])
"""


def test_portable_code_built_by_two_processes_at_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.FORCED, build.runnable()[0])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    both = [subprocess.Popen([sys.executable, "-c", CHECK], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in both] == [("", 0)] * 2
    assert [path.suffix for path in sorted((cache_dir / "native").iterdir())] == [".lock", ".so"]


def test_a_library_for_this_machine_has_its_fastest_set_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, every = build.find_compiler(), list(compiler.instruction_sets())
    assert found
    chosen = compiler.needed_sets(found)
    assert chosen[-1] == [name for name in build.runnable() if name != build.TILES][-1]
    assert compiler.needed_sets(found, "avx1024") == chosen
    assert compiler.needed_sets(found, compiler.ALL) == every
    assert compiler.needed_sets(found, every[0])[-1] == every[0]
    monkeypatch.setattr(compiler, "_features", lambda _: "")
    assert compiler.needed_sets(found) == every


@pytest.mark.skipif("avx512" not in compiler.instruction_sets(), reason="of x86")
@pytest.mark.parametrize(
    ("features", "sets"),
    [
        ("SSE2", ["portable"]),
        ("AVX2 FMA", ["portable"]),
        ("AVX2 FMA F16C", ["avx2"]),
        ("AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL", ["avx2", "avx512"]),
        ("AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL AVX512VNNI", ["avx512"]),
        ("AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL znver4", ["avx2", "avx512"]),
        ("AVX2 FMA F16C AVX512F AVX512DQ AVX512BW AVX512VL AVX512VNNI znver4", ["zen"]),
    ],
)
def test_sets_by_what_the_processor_has(features: str, sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "".join(f"#define __{name}__ 1\n" for name in features.split())
    monkeypatch.setattr(compiler, "_features", lambda _: listed)
    assert compiler.needed_sets("c++") == sets


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with told(OptionError, rf"no instruction set 'avx1024' .*; there are {', '.join(build.runnable())}$"):
        build.choose("avx1024")
    with monkeypatch.context() as patch, told(OptionError, "there are none$"):
        patch.setattr(build, "_runnable", lambda _: [])
        build.choose("avx1024")


@pytest.mark.skipif("avx512" not in compiler.instruction_sets(), reason="of x86")
@pytest.mark.parametrize("name", ["avx1024", "zen", build.TILES])
def test_nothing_is_compiled_for_an_instruction_set_that_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.FORCED, name)
    monkeypatch.setattr(build, "_packaged", lambda: None)
    monkeypatch.setattr(build, "_path", lambda *_: pytest.fail("it looks for a library, to compile it"))
    monkeypatch.setattr(compiler, "_features", lambda _: "#define __AVX2__ 1\n#define __FMA__ 1\n#define __F16C__ 1\n")
    build.library.cache_clear()
    try:
        with told(OptionError, rf"no instruction set '{name}' \(PACELINE_ISA\) .*; there are portable, avx2$"):
            build.library()
    finally:
        build.library.cache_clear()


def only_compiler(script: str | None, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose only compiler is this shell script, or none, and which has built nothing yet."""
    if script is not None:
        (folder / "c++").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "folder", lambda: cache)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "needs a C++ compiler"),
        ("echo 'x.cpp:1:10: fatal error: omp.h: no such file' >&2; exit 1", "omp.h: no such file"),
        ("exit 0", "it made no library"),
    ],
)
def test_unavailable(
    script: str | None, words: str, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_compiler(script, tmp_path, cache_dir, monkeypatch)
    build.library.cache_clear()
    try:
        assert not available()
        with pytest.raises(NativeUnavailable) as error:
            build.library()
    finally:
        build.library.cache_clear()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert build.possible() == (script is not None)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "folder", lambda: tmp_path / "file" / "native")
    build.library.cache_clear()
    try:
        with told(NativeUnavailable, "cannot be built: .*file"):
            build.library()
    finally:
        build.library.cache_clear()


def foreign(good: bytes) -> bytes:
    """A library for another kind of processor."""
    return good[:18] + b"\xff\xff" + good[20:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[:40],
        lambda good: good[:5000],  # the system would load it, and end the process
        foreign,
    ],
)
def test_a_library_that_cannot_be_loaded_is_built_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: if what is built cannot be loaded either, that is remembered."""
    good, found = Path(build.library()._name).read_bytes(), build.find_compiler()
    assert found
    path, makes = tmp_path / f"{build._key(found, compiler.needed_sets(found, compiler.ALL))}.so", [good]

    def compile_library(_compiler: str, made: Path, _stage: object, _names: object) -> None:
        fresh = made.with_suffix(".new")
        fresh.write_bytes(makes.pop())
        fresh.replace(made)

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    try:
        path.write_bytes(damage(good))
        build.library.cache_clear()
        assert (build.library()._name, path.read_bytes(), makes) == (str(path), good, [])
        monkeypatch.setattr(build, "folder", lambda: tmp_path / "other")  # a path is loaded once in a process
        makes = [foreign(good)]
        for words in ("built and cannot be loaded", "cannot be loaded.*remembered: delete"):
            build.library.cache_clear()
            with told(NativeUnavailable, words):
                build.library()
    finally:
        build.library.cache_clear()


def test_a_compilation_that_failed_is_remembered(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line tells how to try again; until then the compiler is only asked what it is and for which processor."""
    asked = tmp_path / "asked"
    said = f'echo "$@" >> {asked}\necho "x.cpp:1: fatal error: no omp.h" >&2; exit 1'
    only_compiler(said, tmp_path, cache_dir, monkeypatch)
    for words in ("fatal error: no omp.h", "fatal error: no omp.h (remembered: delete"):
        asked.unlink(missing_ok=True)
        build.library.cache_clear()
        try:
            with told(NativeUnavailable, re.escape(words)):
                build.library()
        finally:
            build.library.cache_clear()
    assert set(asked.read_text().splitlines()) <= {"--version", "-march=native -E -dM -x c++ /dev/null"}


@pytest.mark.parametrize(
    "said",
    [
        "g++: fatal error: Killed signal terminated program cc1plus",
        "cc1plus: out of memory allocating 65536 bytes",
        "error: unable to write: Disk quota exceeded",
    ],
)
def test_a_compilation_that_lacked_memory_or_room_is_tried_again(
    said: str, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_compiler(f"echo '{said}' >&2; exit 1", tmp_path, cache_dir, monkeypatch)
    build.library.cache_clear()
    try:
        with told(NativeUnavailable, "enough memory|disk is full"):
            build.library()
    finally:
        build.library.cache_clear()
    assert list(cache_dir.glob("*.failed")) == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("of these sources", None),
        ("of other sources", "none is installed"),
        ("damaged", "none is installed"),
        ("damaged, with a cache", None),
    ],
)
def test_a_wheels_library_is_taken_if_it_is_of_these_sources(
    made: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is needed then, and none asked for."""
    source = "0" * 24 if made == "of other sources" else compiler.source_key()
    library = Path(build.library()._name)
    if made.startswith("damaged"):
        (tmp_path / f"{source}.so").write_bytes(library.read_bytes()[:100])
    else:
        (tmp_path / f"{source}.so").symlink_to(library)
    if made != "damaged, with a cache":
        monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "packaged_folder", lambda: tmp_path)
    build.library.cache_clear()
    try:
        if words is None:
            found = build.library()._name
            assert (Path(found).parent == tmp_path) == (made == "of these sources")
        else:
            with told(NativeUnavailable, words):
                build.library()
    finally:
        build.library.cache_clear()


@pytest.mark.parametrize("where", ["a wheel", "the cache", "nowhere"])
def test_whether_the_library_is_there_is_told_without_building_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, found = Path(build.library()._name), build.find_compiler()
    assert found
    if where == "a wheel":
        (tmp_path / f"{compiler.source_key()}.so").symlink_to(library)
    elif where == "the cache":
        (tmp_path / f"{build._key(found, compiler.needed_sets(found, compiler.ALL))}.so").symlink_to(library)
    monkeypatch.setattr(build, "packaged_folder", lambda: tmp_path if where == "a wheel" else tmp_path / "none")
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    before = sorted(tmp_path.iterdir())
    assert build.built() == (where != "nowhere")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.built() == (where == "a wheel")
    assert sorted(tmp_path.iterdir()) == before


def test_a_library_that_is_there_and_cannot_be_used_is_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters that can do without go on without."""
    (tmp_path / f"{compiler.source_key()}.so").write_bytes(foreign(Path(build.library()._name).read_bytes()))
    monkeypatch.setattr(build, "packaged_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    build.library.cache_clear()
    try:
        assert not build.built()
    finally:
        build.library.cache_clear()


@pytest.mark.parametrize(("inputs", "output", "near"), [(64, False, 0.1), (64, True, 0.02), (40, False, 1e-6)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_its_own(inputs: int, output: bool, near: float, bias: bool) -> None:
    """Rounded to 4 bits where its rows are whole blocks, or to 8; else as it is."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(51, inputs, generator=draw), torch.randn(5, inputs, generator=draw)
    added = torch.randn(51, generator=draw) if bias else None
    wanted = torch.nn.functional.linear(x, weight, added)
    linear = RoundedLinear(weight, added, output)
    got = linear(x)
    assert float((got - wanted).norm() / wanted.norm()) < near
    assert torch.equal(linear(x[2:3]), got[2:3])
    assert (linear.bytes < 51 * inputs * 2) == (inputs == 64)


def test_logits_are_judged_in_one_call() -> None:
    """As in torch, and of equal logits the first; nothing is changed in them."""
    target, draw = NativeTarget(small_llama().float()), torch.Generator().manual_seed(0)
    for size in (1, 7, 300):
        logits = torch.randn(size, generator=draw) * 4
        logits[size // 2 :] = logits[0] = logits.max()
        before, q = logits.clone(), logits.double().softmax(-1)
        at, top, entropy = target.judge(logits)
        assert at == 0
        assert top == pytest.approx(float(q.max()), rel=1e-5)
        assert entropy == pytest.approx(float(torch.special.entr(q).sum()), rel=1e-5, abs=1e-6)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_logits_of_any_kind_are_judged(dtype: torch.dtype) -> None:
    """Those of a draft model, say; and what does not lie side by side."""
    target, draw = NativeTarget(small_llama().float()), torch.Generator().manual_seed(0)
    logits = torch.randn(5000, 2, generator=draw).mul(4).to(dtype)[:, 1]
    assert target.judge(logits) == target.judge(logits.float().contiguous())
    assert target.judge(logits)[0] == int(logits.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_drafts_of_a_model_in_another_dtype(dtype: torch.dtype) -> None:
    """The target's own weights: its drafts are the target's tokens, but where rounding makes two of them change."""
    target, draft = NativeTarget(small_llama().float(), byte_tokenizer()), small_llama().to(dtype)
    model = as_target(draft, byte_tokenizer())
    llm = paceline.LLM(target, DraftModel(target, model=model), POLICIES.parse("max-confidence:threshold=0"))
    rounds = llm.generate("hello world", max_new_tokens=64, eos=()).stats.rounds
    drafted, accepted = (sum(getattr(one, name) for one in rounds) for name in ("drafted", "accepted"))
    assert accepted >= 0.8 * drafted
    assert accepted > 40


def test_draws_are_quantiles() -> None:
    """Of scores over a temperature, on each instruction set; what is refused is never drawn."""
    target, rng = NativeTarget(small_llama().float()), torch.Generator().manual_seed(0)

    def run() -> Tensor:
        drawn = []
        for size in (1, 9, 256, 257, 5000):
            for temperature in (0.3, 1.0, 2.5):
                scores = torch.randn(size, generator=rng) * 4
                scores[torch.rand(size, generator=rng) < 0.3] = -torch.inf
                scores[size // 2] = 1.0
                mass = (scores.double() / temperature).softmax(-1).cumsum(0)
                for u in (0.0, *torch.rand(20, generator=rng, dtype=torch.float64).tolist(), 1 - 2**-53):
                    drawn.append(token := target.draw(scores, u, temperature))
                    assert scores[token] > -torch.inf
                    assert mass[token] >= u - 1e-5
                    assert token == 0 or mass[token - 1] <= u + 1e-5
        return torch.tensor(drawn)

    def again() -> Tensor:
        rng.manual_seed(0)
        return run()

    on_each_set(again)


def test_draws_of_what_underflows() -> None:
    target, scores = NativeTarget(small_llama().float()), torch.full((1000,), -1.0)
    scores[[300, 700]] = 0.0
    assert target.draw(scores.double(), 0.75, 1e-3) == 700
    for temperature in (1e-6, 1e-3):
        assert [target.draw(scores, u, temperature) for u in (0.0, 0.4999, 0.5, 1 - 2**-53)] == [300, 300, 700, 700]
