from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from paceline.errors import DiskFull, OptionError
from paceline.profiling import PassProfile, Profile, Roofline
from paceline.profiling.plot import check_plot, draw
from told import told

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def profile(tier: str, first: float) -> Profile:
    passes = {
        width: PassProfile(first * width**0.5, first * 0.9, first * width, 5, 100, 10, 1000, first * 0.4)
        for width in (1, 2, 4)
    }
    return Profile("m", "m", tier, "cpu", "float32", 2, 64, True, "why", 0.0, Roofline(4e10, 1e11), passes)


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_draws(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    check_plot(path)
    assert not path.exists()
    draw([profile("torch", 0.02), profile("native", 0.01)], path)
    assert path.read_bytes().startswith(SIGNATURES[suffix])


def test_a_full_disk_leaves_the_plot_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(figure: Figure, path: Path, **how: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "plot.png").write_bytes(b"earlier")
    monkeypatch.setattr(Figure, "savefig", full)
    with told(DiskFull, "is full"):
        draw([profile("torch", 0.02)], tmp_path / "plot.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("plot.png", b"earlier")]


def test_says_what_is_drawn(tmp_path: Path) -> None:
    draw([profile("torch", 0.02), profile("native", 0.01)], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for words in ("torch", "native", "64 tokens of context", "40 GB/s", "100 GFLOPS"):
        assert f"<!-- {words}" in text or words in text


@pytest.mark.parametrize(("name", "words"), [("plot.jpeg2", "ends in .png"), ("gone/plot.png", "there is no folder")])
def test_places_it_cannot_be(tmp_path: Path, name: str, words: str) -> None:
    with told(OptionError, words):
        check_plot(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with told(OptionError, r"plots need matplotlib: pip install 'paceline\[bench\]'"):
        check_plot(tmp_path / "plot.png")
