"""What trained heads have in common: their files, the model they were made for, and where they are found.

A head is a folder with `KIND.json`, all that it is besides tensors, and `KIND.safetensors`, its parameters and the
fingerprint of its model. Those that were trained on this machine lie in the user's cache, others are installed as
packages of files alone, which the entry-point group `paceline.heads` names by model: see docs/heads.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, UnsupportedModel, require
from paceline.files import at_home, read_json, whole
from paceline.registry import AUTO
from paceline.targets import store
from paceline.targets.identity import is_same, model_key
from paceline.targets.store import sha256
from paceline.targets.target import Target

GROUP = "paceline.heads"  # of entry points: the model's key = the package whose folder holds heads for it
#: By a model's key: the distribution in this repository's folder `heads` that has heads for it, and its folder there.
OURS = {"smollm2-135m-b179c9523d0e": ("paceline-heads-smollm2-135m", "heads/smollm2-135m")}
FORMAT = 1
FINGERPRINT = "fingerprint"  # among the tensors of the file

log = logging.getLogger("paceline")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head is: all that is not a tensor.

    Attributes:
        target: name of the model it was made for.
        trained: how it was trained; free form.
    """

    target: str
    trained: dict[str, Any] = field(default_factory=dict)


class TrainedHead(nn.Module):
    """A small network that drafts for one model. Subclasses make their modules in the constructor, from its arguments
    alone, and say what they compute.

    Attributes:
        config: of the subclass's own `Config`.
        fingerprint: of its model, see `probe`.
        tokens: ids of the tokens that its outputs stand for, ascending; None: all, in their order.
    """

    kind: ClassVar[str]  # of its drafter, which its files are named after
    title: ClassVar[str]  # what messages call it
    Config: ClassVar[type[HeadConfig]]

    tokens: Int[Tensor, " vocab"] | None

    def __init__(
        self,
        config: Any,
        fingerprint: Float[Tensor, "tokens hidden"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.fingerprint = config, fingerprint
        self.register_buffer("tokens", tokens)

    def probe(self, target: Target) -> Float[Tensor, "tokens hidden"] | None:
        """The fingerprint of a target, which has blocks, by what this head depends on; None where it cannot fit."""
        raise NotImplementedError

    def place(self, device: torch.device, dtype: torch.dtype) -> Self:
        """See `placed`."""
        return placed(self, device, dtype)

    def labels(self, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The outputs that stand for token ids; -100, which cross-entropy leaves out, where there is none."""
        if self.tokens is None:
            return ids
        at = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)
        return torch.where(self.tokens[at] == ids, at, -100)

    def check(self, target: Target, where: str = "given") -> Self:
        """Itself in eval mode, on the target's device and in its dtype.

        Raises:
            CheckpointError: there is a weight that is no number.
            CheckpointMismatch: it was made for another model.
            UnsupportedModel: the model's layers do not run one by one.
        """
        if not all(bool(torch.isfinite(weight).all()) for weight in self.parameters()):
            raise CheckpointError(f"the {self.title} {where} has weights that are no numbers")
        seen = self.probe(with_blocks(target, self.kind))
        if seen is None or not is_same(seen, self.fingerprint):
            raise CheckpointMismatch(
                f"the {self.title} {where} was made for {self.config.target}: "
                f"{target.name} is another model, or another revision of it"
            )
        return self.place(target.device, target.dtype).eval()

    # -- files -----------------------------------------------------------------------------------------------------
    def save(self, folder: Path | str, dtype: torch.dtype | None = None) -> None:
        """Write `KIND.json` and `KIND.safetensors`, its parameters in `dtype` (default: as they are).

        Each file is complete when it appears, and the first, which comes last, names the hash of the second.
        """
        folder = Path(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        if dtype:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        with whole(folder / config_name(self.kind)) as config, whole(folder / weights_name(self.kind)) as weights:
            save_file({**tensors, FINGERPRINT: self.fingerprint}, weights)
            facts = {"format": FORMAT, **asdict(self.config), "sha256": sha256(weights)}
            config.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str, target: Target | None = None) -> Self:
        """A saved head, in eval mode; with `target` checked against it, on its device and in its dtype.

        Raises:
            CheckpointError: there is none, or it is damaged, or its tensors are not those of its kind.
            CheckpointMismatch: it was made for another model than `target`.
        """
        folder = Path(folder)
        path, facts = folder / weights_name(cls.kind), cls.facts(folder)
        digest = facts.pop("sha256", None)
        try:
            if sha256(path) != digest:
                config = config_name(cls.kind)
                raise CheckpointError(f"{path} is damaged: its hash is not the one that {config} tells")
            tensors = load_file(path)
            head = cls(cls.Config(**facts), tensors.pop(FINGERPRINT), tensors.get("tokens"))
            head.load_state_dict(tensors, assign=True)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:  # of transformers' modules, too, which look at values when they are made
            raise CheckpointError(f"{folder} holds no complete {cls.title}: {' '.join(str(error).split())}") from error
        return head.eval() if target is None else head.check(target, f"in {folder}")

    @classmethod
    def facts(cls, folder: Path) -> dict[str, Any]:
        """What the JSON file beside a head's weights says: the fields of its configuration, and `sha256`.

        Raises CheckpointError when there is none, or not one of ours.
        """
        path = folder / config_name(cls.kind)
        try:
            facts: dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
            if facts.pop("format") != FORMAT:
                raise CheckpointError(f"{path} is of another version of paceline")
        except OSError as error:
            raise CheckpointError(f"there is no {cls.title} in {folder}: {path.name}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} does not describe a head of this kind ({cls.title})") from error
        return facts

    # -- where they are --------------------------------------------------------------------------------------------
    @classmethod
    def stored_path(cls, target: Target) -> Path:
        """Where training keeps this model's heads of this kind: the user's cache. One lies there itself, several in
        folders below, such as `k2`.
        """
        return store.root() / cls.kind / model_key(target)

    @classmethod
    def find(cls, target: Target, **wanted: object) -> Path:
        """The folder of this model's head: the user's own, of several the one trained last, or else one that is
        installed, of several the first by name.

        Args:
            wanted: fields of its configuration that must have these values; those that are None do not count.

        Raises:
            OptionError: there is none.
        """
        wanted = {key: value for key, value in wanted.items() if value is not None}
        for folder in cls._folders(target):
            try:
                facts = cls.facts(folder)
            except CheckpointError as error:  # others may be whole
                log.warning("%s", error)
                continue
            if facts.get("target") == model_key(target) and wanted.items() <= {k: facts.get(k) for k in wanted}.items():
                return folder
        with_these = "".join(f" with {key} = {value}" for key, value in wanted.items())
        raise OptionError(
            f"{cls.kind}: there is no trained {cls.title}{with_these} for {target.name}: {_install(model_key(target))}"
            f"make one with 'paceline train {cls.kind}', or name its folder, as in {cls.kind}:head=FOLDER"
        )

    @classmethod
    def take(
        cls,
        head: str | Path | Self,
        target: Target,
        read_public: Callable[[Path, Target], Self] | None = None,
        **wanted: object,
    ) -> tuple[Self, Path | None]:
        """A head as drafters are given it, checked: a folder to `load`, "auto" to `find`, or one made in Python, which
        is taken over; and its folder, if it has one.

        Args:
            read_public: reads a folder in another program's layout, which has a `config.json` and no file of ours.
            wanted: as of `find`.

        Raises:
            OptionError: there is none, or it is another than is wanted.
            CheckpointError, CheckpointMismatch, UnsupportedModel: see `load` and `check`.
        """
        if isinstance(head, cls):
            made, folder = head.check(target), None
        else:
            folder = cls.find(target, **wanted) if head == AUTO else at_home(str(head))
            ours = read_public is None or (folder / config_name(cls.kind)).exists()
            foreign = not ours and (folder / "config.json").exists()
            made = read_public(folder, target) if read_public and foreign else cls.load(folder, target)
        for key, value in wanted.items():
            has = getattr(made.config, key)
            require(value in (None, has), f"{cls.kind}: the {cls.title} given has {key} = {has}, not {value}")
        return made, folder

    @classmethod
    def _folders(cls, target: Target) -> Iterator[Path]:
        name = config_name(cls.kind)
        own = [path for pattern in (name, f"*/{name}") for path in cls.stored_path(target).glob(pattern)]
        yield from (path.parent for path in sorted(own, key=lambda path: path.stat().st_mtime, reverse=True))
        for folder in installed(model_key(target)):
            for pattern in (name, f"*/{name}"):
                yield from (path.parent for path in sorted(folder.glob(pattern)))


def installed(key: str) -> Iterator[Path]:
    """Folders of installed packages with heads for the model of that key. They are found without being imported."""
    for package in sorted({point.value for point in entry_points(group=GROUP, name=key)}):
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):  # its parent is not there, or it is no name
            spec = None
        # An editable package may have a place among them that is no folder: a hook's.
        places = (spec and spec.submodule_search_locations) or ()
        folders = [folder for folder in map(Path, places) if folder.is_dir()]
        if not folders:
            log.warning("heads for %s: there is no package %s", key, package)
        yield from folders


def _install(key: str) -> str:
    """How to get heads of ours for the model, for a message, where they are not installed."""
    if key not in OURS or any(installed(key)):
        return ""
    package, folder = OURS[key]
    return f"get one with 'pip install {package}' (in a checkout of paceline 'pip install ./{folder}'), "


def config_name(kind: str) -> str:
    return f"{kind}.json"


def weights_name(kind: str) -> str:
    return f"{kind}.safetensors"


def placed(module: M, device: torch.device, dtype: torch.dtype) -> M:
    """A module, moved to a device, and its parameters, but no buffers (as rotary frequencies), to a dtype."""
    nn.Module.to(module, device)
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module


def with_blocks(target: Target, kind: str) -> Target:
    """Itself. Raises UnsupportedModel where its layers do not run one by one."""
    if not target.has_blocks:
        raise UnsupportedModel(f"{kind} needs a model whose layers run one by one; {target.name} is not one")
    return target


def as_ids(tokens: Sequence[int] | None, vocab: int) -> Int[Tensor, " tokens"] | None:
    """Tokens that a head can draft, ascending, each once; None: all. Raises OptionError for what is not among them."""
    if tokens is None:
        return None
    chosen = torch.tensor(sorted(set(tokens)), dtype=torch.long)
    fits = len(chosen) > 0 and int(chosen[0]) >= 0 and int(chosen[-1]) < vocab
    require(fits, f"the tokens to draft must be some of 0 .. {vocab - 1}")
    return chosen
