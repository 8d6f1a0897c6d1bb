"""A GGUF file's model without its weights: transformers' modules, and the file that their matrices stay in.

Blocks are packed as the file has them, so that no matrix is ever whole in float32; the model itself can be asked for a
few tokens all the same (`reading`), a few rows of a matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from paceline.targets.gguf import STORED
from paceline.targets.loading import quiet
from paceline.targets.native.blocks import BlockMatrix, Blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(folder: str, file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Blocks] | None:
    """The model of a folder that was made of a GGUF file, in eval mode, its tokenizer, and the file. Norms and biases
    are in memory; matrices are zeros that take none. None where this is no way to read the file.

    Raises:
        IntegrityError: the file cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with quiet():
        config: Any = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.generation_config = GenerationConfig.from_pretrained(folder)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    blocks = Blocks(file, config.num_hidden_layers, heads)
    if blocks.architecture not in STORED:
        return None
    for name, weight in list(model.named_parameters()):
        found = blocks.vector(name) if weight.dim() == 1 else torch.zeros(()).expand(weight.shape)
        at, _, kind = name.rpartition(".")
        matrix = blocks.matrix(at)
        there = found is not None if weight.dim() == 1 else matrix is not None and matrix.shape == weight.shape
        if found is None or not there or found.shape != weight.shape:
            return None
        setattr(model.get_submodule(at), kind, nn.Parameter(found, requires_grad=False))
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # on the CPU, with its angles
    return model.eval(), tokenizer, blocks


@contextmanager
def reading(model: PreTrainedModel, blocks: Blocks) -> Iterator[None]:
    """As long as this lasts, the model's modules read the rows of their matrices from the file."""
    linear = (nn.Linear, nn.Embedding)
    matrices: dict[nn.Module, BlockMatrix | None] = {
        module: blocks.matrix(name) for name, module in model.named_modules() if isinstance(module, linear)
    }
    embedding = matrices[model.get_input_embeddings()]
    for module, found in matrices.items():
        matrix = found or embedding  # an output matrix that is tied is not in the file
        assert matrix is not None  # see `load`
        forward = partial(_product, matrix, module.bias) if isinstance(module, nn.Linear) else partial(_rows, matrix)
        module.forward = forward
    try:
        yield
    finally:
        for module in matrices:
            del module.forward


def _product(
    matrix: BlockMatrix, bias: Float[Tensor, " out"] | None, x: Float[Tensor, "*rows in"]
) -> Float[Tensor, "*rows out"]:
    out = x.new_empty(*x.shape[:-1], matrix.shape[0])
    for places, rows in matrix.pieces():
        out[..., places] = functional.linear(x, rows)
    return out if bias is None else out + bias


def _rows(matrix: BlockMatrix, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
    return torch.cat([matrix.floats(row, 1) for row in ids.flatten().tolist()]).view(*ids.shape, -1)
