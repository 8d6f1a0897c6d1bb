"""The native tier's kinds of storage: gguf's floats from every kind of block, on every instruction set, and a GGUF
file with several of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from paceline.targets import sources
from paceline.targets.native import NativeTarget, available
from paceline.targets.native.storage import Storage
from paceline.targets.native.weights import FLOATS, Kind, Packed, Rows
from targets.test_native import chunked, head, kinds, on_each_set, random_ids
from tiny import small_llama
from tiny_gguf import HALVES, random_blocks, write_gguf

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler with OpenMP")

BLOCKS = [kind for kind in Kind if kind not in FLOATS]
# What llama.cpp's Q4_K_M and Q2_K are made of, and what it takes where rows are no multiple of 256.
K_QUANTS = {"token_embd": "Q6_K", "attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K"}
K_QUANTS |= dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q4_K")
FEW_BITS = {"token_embd": "Q6_K", "attn_q": "Q2_K", "attn_k": "Q2_K", "attn_v": "Q3_K", "attn_output": "Q3_K"}
FEW_BITS |= {"ffn_gate": "Q2_K", "ffn_up": "Q2_K", "ffn_down": "Q3_K"}
ODD_ROWS = {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "ffn_down": "Q5_1", "token_embd": "F16"}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def floats_of(kind: Kind, raw: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))


# -- blocks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", BLOCKS)
@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([1e-7, 3e-4, 1.0, None]), zeros=st.booleans())
@settings(max_examples=12)
def test_blocks_are_gguf_s_floats(kind: Kind, seed: int, size: float | None, zeros: bool) -> None:
    """Random bits with scales that are subnormal, of a usual size, large, or any finite ones; and zero."""
    draw = np.random.default_rng(seed)
    raw = random_blocks(kind.name, (21, 512), draw, size or 1.0)
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]][1])
    for at in HALVES.get(kind.name, (0,)):
        if size is None:
            blocks[:, at : at + 2] = draw.integers(0, 256, (len(blocks), 2), dtype=np.uint8)
            blocks[:, at + 1] &= 0xFB  # neither infinite nor no number
        if zeros:
            blocks[::3, at : at + 2] = 0
    plain = floats_of(kind, raw)

    def run() -> Tensor:
        packed = Packed(kind, 512, [21])
        packed.write(torch.from_numpy(raw), packed.places(0))
        unpacked = packed.rows(torch.arange(21))
        assert torch.equal(unpacked, plain)
        return torch.cat([unpacked.flatten(), packed._memory.view(torch.float32)])

    on_each_set(run)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("inputs", [256, 768])
def test_products_have_the_bits_of_the_floats(kind: Kind, inputs: int) -> None:
    """150 outputs: the last panels are fewer than a tile's."""
    if kind in FLOATS:
        whole = torch.randn(150, inputs, generator=torch.Generator().manual_seed(0)).to(FLOATS[kind])
        rows, plain = Rows.of(whole), whole.float()
    else:
        raw = random_blocks(kind.name, (150, inputs), np.random.default_rng(0), 3e-4)
        rows, plain = Rows(kind, inputs, torch.from_numpy(raw)), floats_of(kind, raw)
    model, floats = head(rows), head(Rows.of(plain))
    hidden = torch.randn(120, inputs, generator=torch.Generator().manual_seed(1))
    widths = (*range(1, 18), 23, 33, 97, 120)

    def run() -> Tensor:
        results = [torch.cat([made.head(hidden[:width]) for width in widths]) for made in (model, floats)]
        assert torch.equal(*results)
        return results[0]

    on_each_set(run)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_take_the_file_s_bytes(kind: Kind) -> None:
    """K-quants up to three percent more; those of two and three bits, which are rare, have wider scales or numbers."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    most = {Kind.Q2_K: 1.2, Kind.Q3_K: 1.34}.get(kind, 1.03)
    assert 1 <= Packed(kind, 512, [64]).bytes / (64 * 512 // block * size) < most


# -- floats ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "dtype", "kind"),
    [
        ("auto", torch.float16, Kind.F16),
        ("auto", torch.bfloat16, Kind.BF16),
        ("fp16", torch.float16, Kind.F16),
        ("fp16", torch.bfloat16, Kind.F32),
        ("bf16", torch.float16, Kind.F32),
        ("fp32", torch.float16, Kind.F32),
    ],
)
def test_the_smallest_floats_that_are_exact(mode: str, dtype: torch.dtype, kind: Kind) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    weight[0, :3] = torch.tensor([0.0, -0.0, 6e-8 if dtype == torch.float16 else 1e-30]).to(dtype)
    linear = torch.nn.Linear(72, 40)
    linear.weight.data = weight.clone()
    packed = Storage(mode, None, 1, {}).pack({"linear": linear})
    assert packed.kind == kind
    assert torch.equal(packed.rows(torch.arange(40)), weight)


def test_a_float16_checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Loaded in float32, as everything is on a CPU; stored as it is in the file."""
    small_llama().half().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    targets = []
    for storage in ("auto", "fp32"):
        model = sources.load_model(str(tmp_path), progress=False)[0]
        targets.append(NativeTarget(model, storage=storage))
    assert kinds(targets[0]) == {Kind.F16}
    assert kinds(targets[1]) == {Kind.F32}
    assert torch.equal(*(chunked(target, random_ids(20), 7) for target in targets))


# -- a file of several kinds -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arch", "mixture"), [("llama", K_QUANTS), ("llama", FEW_BITS), ("llama", ODD_ROWS), ("qwen2", ODD_ROWS)]
)
def test_a_gguf_file_of_several_kinds(arch: str, mixture: dict[str, str], tmp_path: Path, cache_dir: Path) -> None:
    """Queries, keys and values of different kinds are one product; its results those of the dequantised model."""
    file, ids, targets = tmp_path / "mixed.gguf", random_ids(90), []
    write_gguf(file, arch, hidden=256, ffn=512, kinds=mixture)
    for storage in ("auto", "fp32"):
        model = sources.load_model(str(file), progress=False)[0]
        dequantised = model(ids[None]).logits[0]
        targets.append(NativeTarget(model, storage=storage))
    mixed, floats = targets
    first = mixed.native.matrices[0].chain  # of query, key and value
    assert len(first) == len({mixture[name] for name in ("attn_q", "attn_k", "attn_v")})
    assert all(matrix._bias.numel() == (matrix.outputs if arch == "qwen2" else 0) for matrix in first)
    assert kinds(mixed) == {Kind[name] for name in (*mixture.values(), *(("Q4_1",) if mixture is ODD_ROWS else ()))}
    assert mixed.weight_bytes < floats.weight_bytes / 3
    want = chunked(floats, ids, 90)
    torch.testing.assert_close(want, dequantised, rtol=1e-4, atol=1e-4)

    def run() -> Tensor:
        results = [chunked(mixed, ids, width) for width in (1, 4, 37, 90)]
        for result in results:
            assert torch.equal(result, want)
        return results[0]

    on_each_set(run)


def test_gate_and_up_of_different_kinds(tmp_path: Path, cache_dir: Path) -> None:
    """They are interleaved, in one kind: float32 then."""
    write_gguf(tmp_path / "odd.gguf", kinds={"blk.0.ffn_up": "Q5_0"})
    targets = []
    for storage in ("auto", "fp32"):
        model = sources.load_model(str(tmp_path / "odd.gguf"), progress=False)[0]
        targets.append(NativeTarget(model, storage=storage))
    assert [m.kind for m in targets[0].native.matrices if m.kind != Kind.Q4_1] == [Kind.F32, Kind.Q8_0]
    assert torch.equal(*(chunked(target, random_ids(30), 7) for target in targets))
