"""A tiny GGUF file as llama.cpp would write it, and a process that loads it."""

import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.targets import sources

HIDDEN, HEADS, KV, LAYERS, FFN = 64, 4, 2, 2, 96
# Where a block has numbers of half precision: its scale, and its minimum's.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}


def random_blocks(kind: str, shape: tuple[int, ...], draw: np.random.Generator, size: float) -> np.ndarray:
    """Blocks of random bits, whose scales are normal numbers of standard deviation `size`, in half precision."""
    block, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, length), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = draw.standard_normal(raw.shape[:-1]) * size
        raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def vocabulary() -> list[str]:
    """Three special tokens, every byte in GPT-2's spelling, and two newlines as one token."""
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ĊĊ"]


def write_gguf(
    path: Path,
    arch: str = "llama",
    hidden: int = HIDDEN,
    ffn: int = FFN,
    kinds: Mapping[str, str] | None = None,
    turn_end: int | None = None,
) -> dict[str, np.ndarray]:
    """A Llama with Q8_0 embeddings, Q4_1 matrices and F32 norms; returns the dequantised tensors by GGUF name.

    Args:
        arch: "qwen2" has biases of queries, keys and values, "qwen3" norms of queries and keys, and heads
            of 128 numbers, the only size that transformers reads of its files.
        kinds: other kinds, by a matrix's name in its layer or by its name in the file; with one for "output" there is
            an output matrix.
        turn_end: a token that ends a turn, besides the one that ends a text.
    """
    tokens, kinds = vocabulary(), kinds or {}
    size = 128 if arch == "qwen3" else hidden // HEADS
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    rng, plain = np.random.default_rng(0), {}

    def add(name: str, shape: tuple[int, ...], kind: str) -> None:
        numbers = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):  # gguf only reads those
            raw = random_blocks(kind, shape, rng, 3e-4)
        else:
            raw = gguf.quants.quantize((rng.standard_normal(shape) * 0.2).astype(np.float32), numbers)
        writer.add_tensor(name, raw, raw_dtype=numbers)
        plain[name] = gguf.quants.dequantize(raw, numbers)

    add("token_embd.weight", (len(tokens), hidden), kinds.get("token_embd", "Q8_0"))
    if "output" in kinds:
        add("output.weight", (len(tokens), hidden), kinds["output"])
    add("output_norm.weight", (hidden,), "F32")
    queries, kv = HEADS * size, KV * size
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (queries, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }.items():
            add(f"blk.{layer}.{name}.weight", shape, kinds.get(f"blk.{layer}.{name}", kinds.get(name, "Q4_1")))
            if arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{layer}.{name}.bias", shape[:1], "F32")
            if arch == "qwen3" and name in ("attn_q", "attn_k"):
                add(f"blk.{layer}.{name}_norm.weight", (size,), "F32")
        add(f"blk.{layer}.attn_norm.weight", (hidden,), "F32")
        add(f"blk.{layer}.ffn_norm.weight", (hidden,), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def load_in_child(gguf_path: str, log: str, kill: bool, ready: Barrier) -> None:
    """Load the model once all processes are `ready`; a line in `log` for a conversion, which `kill` ends half-way.

    Here because a spawned process imports it by name, which pytest's importlib mode does not offer for test files.
    """
    convert = sources.convert

    def logged(path, out, name, step, without):
        with Path(log).open("a") as file:
            file.write("converted\n")
        if kill:
            (out / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # long enough for the other process to come and find the lock taken
        return convert(path, out, name, step, without)

    sources.convert = logged
    ready.wait(120)
    sources.load_model(gguf_path, progress=False)
