"""Shared by all tests: a tiny Llama with a byte-level tokenizer, in memory and as a folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny import byte_tokenizer, small_llama

# The same examples every time, and no time limits: machines are shared.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.load_profile("paceline")


def pytest_configure(config: pytest.Config) -> None:
    """The native tier is tested on all instruction sets that this machine has.

    Each of several processes keeps its own machine code: numba's index of it is not made for two that write.
    """
    os.environ.setdefault("PACELINE_ISA", "all")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(config.rootpath / ".pytest_cache" / f"numba-{worker}"))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: garbage collection need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def steady_costs() -> Iterator[None]:
    """What passes cost, for automatic budgets, as where width is cheap: measured, it is another in every run."""
    from paceline.profiling import rounds  # not before it is settled where numba keeps its code
    from paceline.targets import cost_model, costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "measure_costs", lambda target: cost_model.Costs({1: 1.0, 64: 1.5}))
        patch.setattr(rounds, "_round_seconds", lambda drafter: cost_model.Costs({0: 1.0, 64: 1.5}))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_native_library() -> Iterator[None]:
    """The native tier's library is compiled once, not for every test with a cache of its own."""
    from paceline.targets.native import build

    folder = build.folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "folder", lambda: folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def packed_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed weights of the tests' models do not fill the user's cache."""
    from paceline.targets.native import start

    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: every text can be written, any id below 257 read."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """3 layers, hidden 32, grouped-query attention, context 256, vocabulary 257, float64. Do not change it."""
    return small_llama()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` in float32 and `tiny_tokenizer`, saved as a Hugging Face model folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    small_llama().float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `PACELINE_CACHE` of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder
