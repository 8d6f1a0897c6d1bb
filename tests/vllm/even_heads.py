"""The same model with more attention heads, so that they can be shared out evenly: new ones say nothing.

Tensor parallelism gives each process as many heads, and the default model's 9, in 3 groups, cannot be halved. A group
whose weights are zero, in every projection, adds exactly nothing to any output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # the axis along which heads lie


def with_even_heads(model: Path, parts: int, out: Path) -> Path:
    """`model`, or its copy in the folder `out` with the fewest groups of heads that `parts` processes can share."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    more = -groups % parts
    if not more:
        return model
    shutil.copytree(model, out)
    config |= {
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_key_value_heads": groups + more,
        "num_attention_heads": heads // groups * (groups + more),
    }
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in out.glob("*.safetensors"):
        save_file({name: _widened(name, tensor, groups, more) for name, tensor in load_file(path).items()}, path)
    return out


def _widened(name: str, tensor: torch.Tensor, groups: int, more: int) -> torch.Tensor:
    for projection, axis in PROJECTIONS.items():
        if f".{projection}." in name:
            shape = list(tensor.shape)
            shape[axis] = shape[axis] // groups * more
            return torch.cat([tensor, tensor.new_zeros(shape)], axis)
    return tensor
