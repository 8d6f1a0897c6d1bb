"""A GGUF file as a folder for transformers, by its own reader and dequantisation: configuration, tokenizer, and fp32
safetensors where these are wanted.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import pre_tokenizers

from paceline.errors import IntegrityError, ModelError, UnsupportedModel, first_line
from paceline.files import share_weights
from paceline.targets.loading import quiet, read_weights, require_causal
from paceline.targets.store import need

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

STEPS = 4
#: Architectures, by llama.cpp's names, whose tensors are transformers' own but for the order of rows: the native tier
#: packs the file's blocks as they are (`native.stored`).
STORED = ("llama", "qwen2", "qwen3")

# Values of `tokenizer.ggml.pre` whose text is cut at every digit before the GPT-2 pattern (llama.cpp,
# llama-vocab.cpp). transformers 5.23 knows only the pattern and splits "\n\n1." into tokens the model never saw.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}

_READERS = Lock()  # held while transformers is given a reader

#: Control tokens that end a turn, for files that do not state it.
TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"}


def convert(
    gguf: Path, out: Path, name: str, step: Callable[[int], None], without: Collection[str] = ()
) -> dict[str, Any]:
    """Write config, tokenizer and fp32 weights of `gguf` into the folder `out`; returns facts for its manifest.

    `name` stands for the file in messages; `step` is told how many of the `STEPS` are done. Files of the architectures
    `without` keep their weights to themselves. Raises `IntegrityError` for a file that cannot be read,
    `UnsupportedModel` for one that is no causal language model or has no tokenizer, `DiskFull`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # they take seconds
    from transformers.utils.quantization_config import GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # its reader draws a tqdm bar that no setting turns off
    with _one_line(name), quiet(), contextlib.redirect_stderr(io.StringIO()), _one_reader(gguf) as reader:
        config = AutoConfig.from_pretrained(**where)
        require_causal(config, name)
        step(1)
        if reader.get_field("tokenizer.ggml.tokens") is None:
            raise UnsupportedModel(f"{name} has no tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(**where)
        _correct(tokenizer, config, reader)
        ends = _ends(tokenizer, config, reader)
        step(2)
        field = reader.get_field("general.architecture")
        weightless = field is not None and field.contents() in without
        if weightless:
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            how = GgufConfig(gguf.name, dequantize=True)
            model = read_weights(name, **where, config=config, dtype=torch.float32, quantization_config=how)
        if ends and ends != [config.eos_token_id]:
            model.config.eos_token_id = model.generation_config.eos_token_id = ends
    step(3)
    with quiet():
        tokenizer.save_pretrained(out)
        if weightless:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(out)
            model.generation_config.save_pretrained(out)
        else:
            need(out, sum(p.numel() * p.element_size() for p in model.parameters()), "the converted model")
            model.save_pretrained(out)
            share_weights(out)
    step(STEPS)
    return {"dtype": "float32", "gguf_tensors": dict(Counter(t.tensor_type.name for t in reader.tensors))}


def _correct(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, reader: GGUFReader) -> None:
    """Add what the GGUF states and transformers' conversion leaves out."""
    if length := getattr(config, "max_position_embeddings", None):
        tokenizer.model_max_length = length
    field = reader.get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _ends(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, reader: GGUFReader) -> list[int]:
    """Tokens that end an answer, as llama.cpp has them: transformers' conversion knows the end of a text only, and many
    chat models end a turn with another token.
    """
    fields = [reader.get_field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = {int(field.contents()) for field in fields if field is not None}
    named = tokenizer.get_added_vocab()
    turns = TURN_ENDS - {"<|end|>"} if "<|return|>" in named else TURN_ENDS  # gpt-oss says more after a message's end
    ends |= {token for text, token in named.items() if text in turns}
    stated = config.eos_token_id
    ends |= set(stated if isinstance(stated, list) else [] if stated is None else [stated])
    return sorted(token for token in ends if 0 <= token < len(tokenizer))


@contextlib.contextmanager
def _one_reader(path: Path) -> Iterator[GGUFReader]:
    """A reader of the file, which transformers gets as well in place of three of its own: each would take seconds over
    the vocabulary's tokens.
    """
    import gguf  # drafters inside vLLM do without the package

    with _READERS:
        own, reader = gguf.GGUFReader, gguf.GGUFReader(path)

        def known(file: str | Path, *options: Any) -> GGUFReader:
            return reader if Path(file) == path and not options else own(file, *options)

        gguf.GGUFReader = known  # type: ignore[assignment, misc]
        try:
            yield reader
        finally:
            gguf.GGUFReader = own  # type: ignore[misc]


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """The readers raise whatever a cut or odd file makes them stumble over: one line instead."""
    try:
        yield
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:
        if "not supported" in str(error):
            raise UnsupportedModel(f"{name}: {first_line(error)}") from error
        raise IntegrityError(f"{name} cannot be read (is it cut short?): {first_line(error)}") from error
