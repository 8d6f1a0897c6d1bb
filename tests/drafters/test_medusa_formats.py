"""Medusa heads in the public layouts: by key set, and by numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from helpers import one_thread  # noqa: F401
from paceline.cli import main
from paceline.drafters.medusa.formats import read_medusa, write_medusa
from paceline.drafters.medusa.head import VOCABULARIES, MedusaHead
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError
from paceline.targets import load_target
from paceline.targets.reference import as_target
from paceline.targets.target import Target
from tiny import small_llama
from told import told

SIZE, VOCAB, HEADS, K = 32, 257, 3, 2
FEATURES = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama())


def made(**options: Any) -> MedusaHead:
    head = MedusaHead.from_target(small_llama(), **{"heads": HEADS, "layers": K, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


def random(*shape: int) -> Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def original(heads: int = HEADS, layers: int = K) -> dict[str, Tensor]:
    """As FasterDecoding's `ModuleList` of `Sequential(ResBlock, ..., Linear)` names its tensors."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = random(SIZE, SIZE) + head + layer / 2
            tensors[f"{head}.{layer}.linear.bias"] = random(SIZE) - head - layer / 3
        tensors[f"{head}.{layers}.weight"] = random(VOCAB, SIZE) * (1 + head)
    return tensors


def folder_of(path: Path, tensors: dict[str, Any], name: str = "medusa_lm_head.safetensors", **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, **config}))
    if name.endswith(".safetensors"):
        save_file(tensors, path / name)
    else:
        torch.save(tensors, path / name)
    return path


def written(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    [file] = (entry for entry in path.iterdir() if entry.name != "config.json")
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return json.loads((path / "config.json").read_text()), tensors


class TestReading:
    @pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"])
    @torch.no_grad()
    def test_original(self, name: str, target: Target, tmp_path: Path) -> None:
        """The published configuration's number of heads is wrong; the tensors are right."""
        tensors = original()
        head, _ = MedusaHead.take(folder_of(tmp_path / "head", tensors, name), target, read_medusa)
        assert (head.config.heads, head.config.layers, head.config.vocabulary) == (HEADS, K, "own")
        for i in range(HEADS):
            x = FEATURES
            for layer in range(K):
                x = x + silu(x @ tensors[f"{i}.{layer}.linear.weight"].T + tensors[f"{i}.{layer}.linear.bias"])
            torch.testing.assert_close(head(FEATURES)[:, i], x @ tensors[f"{i}.{K}.weight"].T)

    @pytest.mark.parametrize("trimmed_already", [False, True])
    @torch.no_grad()
    def test_vllm_with_a_token_map(self, trimmed_already: bool, target: Target, tmp_path: Path) -> None:
        """One vocabulary layer for all heads, tokens in any order, no biases, a scale, the prefix of older files."""
        kept, matrix = torch.tensor([200, 3, 77, 5]), random(VOCAB, SIZE)
        blocks = {f"medusa_heads.blocks.{h}.layers.0.weight": random(SIZE, SIZE) + h for h in range(2)}
        rows = matrix[kept].contiguous() if trimmed_already else matrix
        tensors = {**blocks, "lm_heads.0.weight": rows, "token_map": kept}
        path = folder_of(tmp_path / "head", tensors, "model.safetensors", logit_scale=2.0)
        head = read_medusa(path, target)
        assert head.tokens.tolist() == [3, 5, 77, 200]
        assert head.config.vocabulary == "shared"
        x = FEATURES + silu(FEATURES @ blocks["medusa_heads.blocks.1.layers.0.weight"].T)
        torch.testing.assert_close(head(FEATURES)[:, 1], 2 * x @ matrix[[3, 5, 77, 200]].T)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"1.0.linear.weight": None}, "missing: 1.0.linear.weight"),
            ({"2.2.weight": None}, "missing: 2.2.weight"),
            ({"0.0.linear.bias": None}, "missing: 0.0.linear.bias"),
            ({"lm_head.weight": random(3)}, "unknown: lm_head.weight"),
            ({"0.9.weight": random(VOCAB, SIZE)}, "unknown: 0.9.weight"),
            ({"1.1.linear.weight": random(SIZE, 7)}, r"misshaped: 1.1.linear.weight \[32, 7\] instead of \[32, 32\]"),
            ({"1.1.linear.bias": random(7)}, "misshaped: 1.1.linear.bias"),
            ({"token_map": torch.tensor([[1]])}, "vocabulary|token_map"),
            ({"0.0.linear.weight": torch.ones(SIZE, SIZE, dtype=torch.int64)}, "another type: 0.0.linear.weight of"),
            ({"0.0.linear.bias": torch.full([SIZE], torch.nan)}, "weights that are no numbers"),
        ],
    )
    def test_tensors_that_do_not_belong(
        self, change: dict[str, Tensor | None], says: str, target: Target, tmp_path: Path
    ) -> None:
        tensors = {name: tensor for name, tensor in (original() | change).items() if tensor is not None}
        with told(CheckpointError, says):
            read_medusa(folder_of(tmp_path / "head", tensors), target)

    @pytest.mark.parametrize("scale", [None, "x", 0, -1.0])
    def test_a_scale_that_is_none(self, scale: object, target: Target, tmp_path: Path) -> None:
        with told(CheckpointError, "logit_scale in .* must be a number > 0"):
            read_medusa(folder_of(tmp_path / "head", original(), logit_scale=scale), target)

    def test_of_another_model(self, target: Target, tmp_path: Path) -> None:
        path = folder_of(tmp_path / "head", original())
        with told(CheckpointMismatch, "hidden states of 32, those of .* are of 64"):
            read_medusa(path, as_target(small_llama(hidden_size=64)))
        with told(CheckpointMismatch, "another vocabulary than that of .*, 300 tokens"):
            read_medusa(path, as_target(small_llama(vocab_size=300)))
        beyond = {**original(), "token_map": torch.tensor([1, VOCAB])}
        with told(CheckpointMismatch, "another vocabulary"):
            read_medusa(folder_of(tmp_path / "beyond", beyond), target)

    def test_nothing_to_read(self, target: Target, tmp_path: Path) -> None:
        with told(CheckpointError, "no Medusa heads in"):
            read_medusa(folder_of(tmp_path / "other", {"layers.0.weight": random(3)}), target)
        path = folder_of(tmp_path / "empty", original())
        (path / "medusa_lm_head.safetensors").write_bytes(b"\0" * 99)
        with told(CheckpointError, "damaged"):
            MedusaHead.take(path, target, read_medusa)
        (path / "medusa_lm_head.safetensors").unlink()
        with told(CheckpointError, "there are no weights in"):
            MedusaHead.take(path, target, read_medusa)
        for text in ("{", "[" * 100_000):
            (path / "config.json").write_text(text)
            with told(CheckpointError, "not JSON"):
                MedusaHead.take(path, target, read_medusa)
        (path / "config.json").unlink()
        with told(CheckpointError, "there is no Medusa head in"):
            MedusaHead.take(path, target, read_medusa)

    def test_a_pickle_with_code_in_it(self, target: Target, tmp_path: Path) -> None:
        class Code:
            def __reduce__(self) -> tuple[Any, tuple[str]]:
                return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

        for name, write in (("zip", torch.save), ("bare", lambda what, file: file.write_bytes(pickle.dumps(what, 2)))):
            path = folder_of(tmp_path / name, original())
            (path / "medusa_lm_head.safetensors").unlink()
            write({**original(), "extra": Code()}, path / "medusa_lm_head.pt")
            with told(CheckpointError, "could run code and is not read"):
                read_medusa(path, target)
        assert not (tmp_path / "ran").exists()
        for other in ([1, 2], {1: torch.ones(2)}):
            torch.save(other, path / "medusa_lm_head.pt")
            with told(CheckpointError, "does not hold tensors by name"):
                read_medusa(path, target)
        (path / "medusa_lm_head.pt").write_bytes(b"")
        with told(CheckpointError, "damaged"):
            read_medusa(path, target)


class TestWriting:
    @pytest.mark.parametrize("vocabulary", VOCABULARIES)
    @pytest.mark.parametrize("layout", ["vllm", "original"])
    @torch.no_grad()
    def test_round_trip(self, layout: Any, vocabulary: str, target: Target, tmp_path: Path) -> None:
        head = made(vocabulary=vocabulary)
        write_medusa(head, target, tmp_path / "out", layout)
        read, _ = MedusaHead.take(tmp_path / "out", target, read_medusa)
        assert all(torch.equal(getattr(read, name), getattr(head, name)) for name in ("weight", "bias", "matrix"))
        assert read.config.vocabulary == ("own" if vocabulary == "own" else "shared")
        assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1

    @torch.no_grad()
    def test_original_keys(self, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        head = made()
        write_medusa(head, target, tmp_path / "out", "original", torch.float16)
        config, tensors = written(tmp_path / "out")
        assert "ties the blocks" in caplog.text
        assert tensors.keys() == original().keys()
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
        assert {config[name] for name in ("medusa_num_heads", "medusa_num_layers")} == {HEADS, K}
        assert torch.equal(tensors["2.1.linear.weight"], head.weight[1, 2].half())
        assert torch.equal(tensors["2.1.linear.bias"], head.bias[1, 2].half())
        assert torch.equal(tensors["2.2.weight"], head.matrix[0].half())

    @torch.no_grad()
    def test_vllm_keys(self, target: Target, tmp_path: Path) -> None:
        blocks = {f"blocks.{h}.layers.{k}.{p}" for h in range(HEADS) for k in range(K) for p in ("weight", "bias")}
        outputs = {f"lm_heads.{h}.weight" for h in range(HEADS)}
        write_medusa(made(vocabulary="own"), target, tmp_path / "own", "vllm")
        config, tensors = written(tmp_path / "own")
        assert tensors.keys() == blocks | outputs
        assert (config["num_heads"], config["num_hidden_layers"], config["hidden_size"]) == (HEADS, K, SIZE)
        assert (config["vocab_size"], config["original_lm_head"], config["medusa_fc_bias"]) == (VOCAB, False, True)
        write_medusa(made(tokens=range(9)), target, tmp_path / "shared", "vllm")
        config, tensors = written(tmp_path / "shared")
        assert tensors.keys() == blocks | {"lm_heads.0.weight"}
        assert config["original_lm_head"]
        write_medusa(made(), target, tmp_path / "original", "original")  # vLLM reads this layout, too
        assert config.items() & {("hidden_size", SIZE), ("vocab_size", VOCAB), ("medusa_fc_bias", True)} <= (
            written(tmp_path / "original")[0].items()
        )
        # what vLLM's reader of configurations would take for one of these numbers
        assert {name for name in config if "num" in name} == {"num_heads", "num_hidden_layers"}

    @pytest.mark.parametrize("layout", ["vllm", "original"])
    @pytest.mark.parametrize("vocabulary", VOCABULARIES)
    @torch.no_grad()
    def test_what_cannot_be_drafted_is_never_likeliest(
        self, layout: Any, vocabulary: str, target: Target, tmp_path: Path
    ) -> None:
        """The layouts have a logit for every token."""
        head = made(vocabulary=vocabulary, tokens=range(50, 90))
        write_medusa(head, target, tmp_path / "out", layout)
        full = read_medusa(tmp_path / "out", target)(FEATURES)
        assert full.shape[-1] == VOCAB
        torch.testing.assert_close(full[..., 50:90], head(FEATURES))
        assert torch.equal(full.argmax(-1), head(FEATURES).argmax(-1) + 50)

    def test_a_folder_that_is_not_empty(self, target: Target, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        for out in (tmp_path, tmp_path / "mine"):
            with told(OptionError, "not empty"):
                write_medusa(made(), target, out, "vllm")
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("layout", ["vllm", "original"])
def test_command(layout: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported, exported again from there, and used."""
    target = load_target(str(tiny_model_dir), tier="reference")
    MedusaHead.from_target(target.model, heads=2, tokens=range(99)).save(tmp_path / "head")
    use = ["--model", str(tiny_model_dir), "--format", layout, "--json"]
    command = ["export", "medusa", *use, "--head"]
    assert main([*command, str(tmp_path / "head"), "--out", str(tmp_path / "one")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["head"] == str(tmp_path / "head")
    assert (told["heads"], told["layers"]) == (2, 1)
    assert main([*command, str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 0
    one, two = (written(tmp_path / name)[1] for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    use = ["generate", "hi", "--model", str(tiny_model_dir), "-n", "4", "-d", f"medusa:head={tmp_path / 'two'}"]
    assert main(use) == 0
    assert main([*command, str(tmp_path / "nowhere"), "--out", str(tmp_path / "three")]) == 1
    assert "no Medusa head" in capsys.readouterr().err
