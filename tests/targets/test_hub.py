"""Names that go to the hub, with the hub replaced by its answers."""

from collections import namedtuple

import pytest
from huggingface_hub import errors as hub_errors

from paceline.errors import DownloadError, UnknownModel, UnsupportedModel
from paceline.targets import as_target, hub
from paceline.targets.identity import model_key
from paceline.targets.sources import load_model, resolve
from told import told


class Hub:
    """Stands for `HfApi`: answers every question with the same error or model."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self):
        return self

    def model_info(self, repo, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def refusal(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want an HTTP response of the hub's own library
    error.args = ("no",)
    return error


@pytest.mark.parametrize(
    ("name", "answer", "error", "says"),
    [
        ("org/model", OSError("Name or service not known"), DownloadError, "no network"),
        ("org/model", hub_errors.OfflineModeIsEnabled("off"), DownloadError, "no network"),
        ("smolm2", OSError("Name or service not known"), UnknownModel, "did you mean smollm2-135m"),
        ("org/model", refusal(hub_errors.RepositoryNotFoundError), UnknownModel, "the hub has no model 'org/model'"),
        ("org/model", refusal(hub_errors.RevisionNotFoundError), UnknownModel, "revision 'v2'"),
        ("org/model", refusal(hub_errors.GatedRepoError), DownloadError, "gated"),
    ],
)
def test_hub_failures(name, answer, error, says, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", Hub(answer))
    with told(error, says):
        load_model(name, revision="v2", progress=False)


def test_hub_files_are_looked_at_before_they_are_fetched(monkeypatch):
    file = namedtuple("file", "rfilename")
    info = namedtuple("info", "siblings")
    for files, says in {("config.json", "pytorch_model.bin"): "safetensors", ("model.onnx",): "config.json"}.items():
        monkeypatch.setattr(hub, "HfApi", Hub(info([file(name) for name in files])))
        with told(UnsupportedModel, says):
            resolve("org/model")
    monkeypatch.setattr(hub, "HfApi", Hub(info([file("config.json"), file("model.safetensors")])))
    source = resolve("org/model", revision="v2")
    assert (source.location, source.local, source.revision) == ("org/model", False, "v2")


def test_hub_cache_serves_without_network(monkeypatch, tiny_model_dir):
    monkeypatch.setattr(hub, "HfApi", Hub(OSError("Name or service not known")))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *a, **k: str(tiny_model_dir / "config.json"))
    model, _ = load_model("org/model", progress=False)
    assert resolve("org/model").location == str(tiny_model_dir)
    assert model_key(as_target(model)) == "org--model"  # heads and profiles are found as with network
    assert resolve("org/model").key == "org/model"


@pytest.mark.parametrize(
    "name", ["", "./nowhere", "~nobody/x", "/no/such/folder", "no/such.gguf", "a/b/c", "bad name", "\0"]
)
def test_unknown_names_are_not_sent_to_the_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "find", None)
    with told(UnknownModel, "smollm2-135m"):
        resolve(name)
