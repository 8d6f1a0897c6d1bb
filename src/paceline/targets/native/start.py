"""Starting the native tier from what an earlier start has packed, without transformers' model classes.

`packed/` of the store holds a file a model. It is used as long as the model's files, paceline's sources and the
versions of torch and transformers are those it was made from; else it is made again. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from paceline.errors import IntegrityError, ModelError
from paceline.files import whole
from paceline.targets import store
from paceline.targets.loading import quiet
from paceline.targets.native import kept
from paceline.targets.native.build import library
from paceline.targets.native.target import NativeTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARE = 0.1  # of the free disk, at most, that a file may take
_OF_TRANSFORMERS = ("model", "config", "tokenizer")  # attributes of a target

log = logging.getLogger("paceline")


class KeptConfig:
    """A model's configuration: its plain values as they were, anything else from transformers' own class, which is
    imported when it is asked for.
    """

    def __init__(self, values: dict[str, Any], location: str) -> None:
        vars(self).update(values)
        self._location = location

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_real_config(self._location), name)


class NoModel:
    """Stands for the model of transformers, which was not loaded."""

    def __init__(self, config: KeptConfig, eos: tuple[int, ...]) -> None:
        self.config, self.generation_config = config, SimpleNamespace(eos_token_id=list(eos))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this target has packed weights and no transformers model to ask for '{name}': "
            "load it with tier='reference'"
        )


def start(location: str) -> NativeTarget | None:
    """The target of a model folder, from its file; None where there is none, or none that can be used.

    Raises:
        NativeUnavailable: the C++ code cannot be built here.
    """
    path = file_of(location)
    try:
        with path.open("rb", buffering=0) as file:
            header = kept.read_about(file)
            about = header["about"]
            if about["made_from"] != made_from(location):
                return None
            library()
            state = kept.read(file, header)
            target = NativeTarget.__new__(NativeTarget)
            vars(target).update(state)
            values = about["config"] | {"name_or_path": location}  # as it is called now
            target.config = KeptConfig(values, location)  # type: ignore[assignment]  # as good as
            target.model = NoModel(target.config, tuple(about["eos"]))  # type: ignore[assignment,arg-type]
            target.tokenizer = _tokenizer(about["tokenizer"], location)
            return target
    except FileNotFoundError:
        return None
    except ModelError as error:
        if not isinstance(error, IntegrityError):
            raise
        reason: object = error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        reason = error
    log.warning("The packed weights in %s cannot be used (%s); packing them again.", path, reason)
    return None


def keep(target: NativeTarget, location: str, facts: dict[str, Any]) -> None:
    """Write the file of a model folder's target, for `start`. What prevents it is no error: a full disk, a folder that
    cannot be written to, another process at it, or a target with parts that cannot be kept.

    Args:
        facts: `made_from` before the model was read: nothing is kept where it is another one now.
    """
    if Path(location, "adapter_config.json").exists():  # whether it counts depends on what is installed
        return
    path, size = file_of(location), sum(matrix.bytes for matrix in target.native.matrices)
    state = {name: value for name, value in vars(target).items() if name not in _OF_TRANSFORMERS}
    try:
        about = {
            "made_from": facts,
            "config": _plain_values(target.config),
            "eos": target.eos,
            "tokenizer": _tokenizer_class(target.tokenizer, location),
        }
        if facts != made_from(location):
            log.debug("Not keeping packed weights: the model's files have changed while they were read.")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if size > SHARE * shutil.disk_usage(path.parent).free:
            log.debug("Not keeping packed weights of %d bytes: there is little room on the disk.", size)
            return
        with FileLock(path.with_suffix(".lock"), timeout=0), whole(path) as partial:
            kept.write(partial, about, state)
    except (OSError, Timeout, ModelError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        log.debug("Not keeping packed weights: %s", error)


def file_of(location: str) -> Path:
    """Where the packed weights of a model folder are kept."""
    whole_name = str(Path(location).absolute())
    digest = hashlib.sha256(whole_name.encode()).hexdigest()[:12]
    return folder() / f"{Path(whole_name).name[:60]}-{digest}.packed"


def folder() -> Path:
    return store.root() / "packed"


def made_from(location: str) -> dict[str, Any]:
    """All that packed weights depend on: the model's files, and the code that reads, checks and packs them."""
    real = Path(location).resolve()  # a link may lead to another model tomorrow
    # Sizes and times may be another checkpoint's: copies, archives and images carry times along. When a file was last
    # changed (ctime) is the system's own, and no copy has it. Its inode says less: a file that is written over keeps
    # it, and in a container it may be another one after each start.
    stats = [(path.name, path.stat()) for path in sorted(real.iterdir()) if path.is_file()]
    facts = [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats]
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"folder": str(real), "files": facts, "sources": _sources(), **versions}


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for pattern in ("*.py", "native/*.py", "native/*.h", "native/*.cpp"):
        for path in sorted(Path(__file__).parents[1].glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _real_config(location: str) -> Any:
    from transformers import AutoConfig

    with quiet():
        return AutoConfig.from_pretrained(location).get_text_config()


def _plain_values(config: Any) -> dict[str, Any]:
    """Those that are the same in JSON."""
    values = config.to_dict() | {"name_or_path": config.name_or_path, "model_type": config.model_type}
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and _is_plain(value) and getattr(config, name, None) == value
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _tokenizer_class(tokenizer: PreTrainedTokenizerBase | None, location: str) -> str:
    """The class, if it makes the same tokenizer of the folder's files by itself; else empty: transformers' auto class
    has to look at the model again.
    """
    kind: Any = type(tokenizer)
    if tokenizer is None or not kind.__module__.startswith("transformers."):
        return ""
    try:
        with quiet():
            twin = kind.from_pretrained(location)
        same = all(_facts(twin)[name] == value for name, value in _facts(tokenizer).items())
    except Exception:  # whatever it needs besides
        return ""
    return f"{kind.__module__}:{kind.__name__}" if same else ""


def _facts(tokenizer: Any) -> dict[str, Any]:
    names = ("chat_template", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces")
    facts = {name: getattr(tokenizer, name, None) for name in (*names, "all_special_ids", "special_tokens_map")}
    return facts | {"backend": tokenizer.backend_tokenizer.to_str()}


def _tokenizer(kind: str, location: str) -> PreTrainedTokenizerBase:
    module, _, name = (kind or "transformers:AutoTokenizer").partition(":")
    with quiet():
        made: PreTrainedTokenizerBase = getattr(import_module(module), name).from_pretrained(location)
    return made
