"""The set of sublayers a layer-skipping draft leaves out, and where it is stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import OptionError
from paceline.files import at_home, read_json, whole
from paceline.targets import store
from paceline.targets.identity import model_key
from paceline.targets.target import Target

KINDS = ("attention", "mlp")
SHIPPED = Path(__file__).parents[2] / "data" / "layer-skip"


@dataclass(frozen=True)
class SkipSet:
    """Skipped sublayers of a model with `layers` layers; `found` tells how they were chosen."""

    layers: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    found: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def sublayers(self) -> frozenset[tuple[int, str]]:
        return frozenset((layer, kind) for kind in KINDS for layer in getattr(self, kind))

    @classmethod
    def even(cls, layers: int, share: float = 0.4) -> SkipSet:
        """Skip `share` of the sublayers, spread evenly, but none in the first and last tenth of the depth."""
        edge = max(1, layers // 10)
        inner = range(edge, layers - edge)
        count = min(len(inner), round(share * layers))
        chosen = tuple(inner[int((i + 0.5) * len(inner) / count)] for i in range(count)) if count else ()
        return cls(layers, chosen, chosen, {"method": "even"})

    @classmethod
    def load(cls, path: str | Path, target: Target) -> SkipSet:
        """Raises OptionError when the file is missing, malformed or for a model of another depth."""
        try:
            data = read_json(at_home(path).read_text(encoding="utf-8"))
            found = cls(data["layers"], tuple(data["attention"]), tuple(data["mlp"]), data.get("found", {}))
            known = all(isinstance(layer, int) and 0 <= layer < found.layers for layer, _ in found.sublayers)
        except OSError as error:
            raise OptionError(f"layer-skip: cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"layer-skip: {path} is not a result of 'paceline layer-skip search'") from error
        if not known:
            raise OptionError(f"layer-skip: {path} names layers that a model of {found.layers} does not have")
        if found.layers != target.num_layers:
            raise OptionError(f"layer-skip: {path} is for {found.layers} layers; the model has {target.num_layers}")
        return found

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        with whole(path) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def find(cls, target: Target) -> SkipSet:
        """The set a search of the user's has stored for this model, else the one that comes with paceline, else the
        even one.
        """
        for known in (stored_path(target), SHIPPED / f"{model_key(target)}.json"):
            if known.is_file():
                return cls.load(known, target)
        return cls.even(target.num_layers)


def stored_path(target: Target) -> Path:
    """Where a search keeps its result for this model: the user's cache."""
    return store.root() / "layer-skip" / f"{model_key(target)}.json"
