"""Heads of the default model, `heads/smollm2-135m`, as they are installed: `make dev` does it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.drafting import heads
from paceline.drafting.heads import FINGERPRINT, GROUP, OURS, TrainedHead, config_name, installed, weights_name
from paceline.errors import OptionError
from paceline.targets.reference import as_target
from tiny import small_llama
from told import told

ROOT = Path(__file__).parents[2]
KEY = "smollm2-135m-b179c9523d0e"

HEADS = [
    (kind, path.parent, folder)
    for folder in installed(KEY)
    for kind in (ExitHead, MedusaHead, EagleHead, Eagle3Head)
    for path in sorted(folder.rglob(config_name(kind.kind)))
]


@pytest.mark.parametrize(("kind", "folder", "package"), HEADS, ids=str)
def test_head(kind: type[TrainedHead], folder: Path, package: Path) -> None:
    """Whole, small, in half precision, for the model that the entry point names, and with its provenance."""
    assert kind.load(folder).config.target == KEY
    weights = folder / weights_name(kind.kind)
    assert weights.stat().st_size < 16_000_000
    kinds = {tensor.dtype for name, tensor in load_file(weights).items() if name != FINGERPRINT}
    assert kinds <= {torch.float16, torch.int64}
    provenance = (package / "PROVENANCE.md").read_text(encoding="utf-8")
    assert f"## `{folder.name if folder != package else kind.kind}`" in provenance


def test_they_are_installed() -> None:
    assert {(kind, folder.relative_to(package).as_posix()) for kind, folder, package in HEADS} == {
        (ExitHead, "."),
        (MedusaHead, "medusa-k1"),
        (MedusaHead, "medusa-k2-adv"),
        (EagleHead, "eagle-k1"),
        (EagleHead, "eagle-k2-adv"),
        (Eagle3Head, "eagle3"),
    }


def test_their_distribution_is_the_one_that_messages_name() -> None:
    for key, (package, folder) in OURS.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == package
        assert key in project["entry-points"][GROUP]


class TestMissing:
    """Without heads, one line says how to get some."""

    @pytest.fixture(autouse=True)
    def nothing(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heads, "entry_points", lambda **_: ())

    def message(self, name: str) -> str:
        model = small_llama()
        model.config.name_or_path = name
        with pytest.raises(OptionError) as error:
            Eagle(as_target(model))
        return str(error.value)

    def test_those_of_the_default_model_can_be_installed(self) -> None:
        message = self.message(KEY)
        assert "'pip install paceline-heads-smollm2-135m'" in message
        assert "'pip install ./heads/smollm2-135m'" in message
        assert "'paceline train eagle'" in message
        assert "\n" not in message

    def test_others_can_be_trained(self) -> None:
        message = self.message("somebody/model")
        assert "pip install" not in message
        assert "'paceline train eagle'" in message


class TestInstalled:
    """Packages that the entry points name."""

    @pytest.fixture
    def point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Point:
            def __init__(self, value: str) -> None:
                self.value = value

        points = {"llama": ["heads_of_a_team", "not_there", "not_there.either"]}
        monkeypatch.setattr(heads, "entry_points", lambda group, name: [Point(value) for value in points.get(name, ())])

    @pytest.mark.usefixtures("point", "cache_dir")
    def test_are_searched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They need no code, what is missing is left out with a word, and what they hold is checked as any head is."""
        model = small_llama()
        package = tmp_path / "site" / "heads_of_a_team"
        MedusaHead.from_target(model, heads=2, layers=1, tokens=range(240)).save(package)
        MedusaHead.from_target(model, heads=2, layers=2, tokens=range(240)).save(package / "deeper")
        monkeypatch.syspath_prepend(package.parent)
        target = as_target(model)
        assert MedusaHead.find(target) == package
        assert MedusaHead.find(target, layers=2) == package / "deeper"
        with told(OptionError, "no trained Medusa head with layers = 3"):
            MedusaHead.find(target, layers=3)
        assert "heads for llama: there is no package not_there" in caplog.text
        assert "heads for llama: there is no package not_there.either" in caplog.text

    @pytest.mark.usefixtures("point")
    def test_are_for_the_model_of_that_key(self) -> None:
        assert list(installed("another")) == []
