"""Arrays that were made of a corpus, mapped from the file that holds them: they are of one tokenizer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from paceline.errors import IntegrityError, TokenizerMismatch
from paceline.targets.tokenizers import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def mapped(
    path: Path, form: str, tokenizer: PreTrainedTokenizerBase | None, kind: str, command: str
) -> Iterator[tuple[dict[str, str], Callable[[str], np.ndarray]]]:
    """The metadata of a safetensors file, and what maps an array of it by name, read-only.

    Args:
        form: the format that the metadata must name.
        tokenizer: of the target; must be the one that the file was built with.
        kind: what messages call the file.
        command: builds one.

    Raises:
        IntegrityError: there is no such file, or it is damaged or something else, as whoever reads it may find, too.
        TokenizerMismatch: it was built with another tokenizer.
    """
    try:
        # Through torch, because safetensors copies what it gives to numpy and maps what it gives to torch.
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("format") != form:
                raise IntegrityError(f"{path} is no {kind} of this version of paceline: build it again")
            if tokenizer is None or facts["tokenizer"] != fingerprint(tokenizer):
                raise TokenizerMismatch(
                    f"{path} was built with another tokenizer (that of {facts.get('model') or 'an unnamed model'}): "
                    f"build one for this model with '{command}'"
                )
            yield facts, lambda name: read_only(file.get_tensor(name).numpy())
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise IntegrityError(f"cannot read the {kind} {path}: {error}") from error


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
