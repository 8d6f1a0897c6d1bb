"""Which head `eagle` drafts with: of EAGLE's first form or of EAGLE-3's, ours or in a public layout."""

from __future__ import annotations

from pathlib import Path

from paceline.drafters.eagle.eagle3_formats import is_eagle3, read_eagle3
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.formats import read_eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.heads import config_name
from paceline.drafting.layouts import CONFIG, read_config
from paceline.errors import OptionError
from paceline.files import at_home
from paceline.registry import AUTO
from paceline.targets.target import Target

EagleKind = EagleHead | Eagle3Head


def take_eagle(
    head: str | Path | EagleKind, target: Target, *, layers: int | None = None
) -> tuple[EagleKind, Path | None]:
    """A head of either kind, checked, and its folder, if it has one: see `TrainedHead.take`.

    Raises:
        OptionError: there is none, or it is another than is wanted.
        CheckpointError, CheckpointMismatch, UnsupportedModel: see `TrainedHead.load` and `read_eagle3`.
    """
    kind: type[EagleKind] = EagleHead
    if isinstance(head, EagleHead | Eagle3Head):
        kind = type(head)
    elif head == AUTO:
        kind, head = find_eagle(target, layers)
    else:
        head = at_home(head)
        kind = kind_in(head)
    if issubclass(kind, Eagle3Head):
        return Eagle3Head.take(head, target, read_eagle3, layers=layers)  # type: ignore[arg-type]
    return EagleHead.take(head, target, read_eagle, layers=layers)  # type: ignore[arg-type]


def find_eagle(target: Target, layers: int | None = None) -> tuple[type[EagleKind], Path]:
    """This model's head and its folder: of the user's own the one trained last, else of those installed an EAGLE-3 one
    before one of the first form.

    Raises:
        OptionError: there is none.
    """
    found: list[tuple[float, type[EagleKind], Path]] = []
    refused: OptionError | None = None
    for kind in (Eagle3Head, EagleHead):
        try:
            folder = kind.find(target, layers=layers)
        except OptionError as error:
            refused = error
            continue
        own = folder.is_relative_to(kind.stored_path(target))
        found.append(((folder / config_name(kind.kind)).stat().st_mtime if own else 0.0, kind, folder))
    if not found:
        assert refused is not None
        raise refused
    _, best, folder = max(found, key=lambda one: one[0])  # of those installed, which are equal here, the first
    return best, folder


def kind_in(folder: Path) -> type[EagleKind]:
    """The kind of head in a folder. Where there is none, EAGLE's reader says so."""
    if (folder / config_name(Eagle3Head.kind)).exists():
        return Eagle3Head
    ours = (folder / config_name(EagleHead.kind)).exists()
    return Eagle3Head if not ours and (folder / CONFIG).exists() and is_eagle3(read_config(folder)) else EagleHead
