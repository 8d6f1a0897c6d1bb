"""What an output must match: a grammar, as a mask over the target's logits. The parser is llguidance's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafting.lookup import common_length
from paceline.errors import OptionError, first_line, require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from paceline.drafting.tree import TokenTree

#: As `json.dumps` writes: a model that may put blanks anywhere can do so without end.
STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPILED = 32  # grammars kept ready, the last used ones
ENDS = 4  # likewise, sets of tokens that end an output: for each the vocabulary is kept once more, some 30 MB

_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()
_lock = Lock()


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that fits a schema. Objects' keys come in the schema's order."""
    try:
        return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": STYLE}}]})
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"json_schema is no JSON: {first_line(error)}") from error


def lark_grammar(text: str) -> str:
    """The grammar that a text describes, as Lark does with llguidance's additions (`%json {…}` and others)."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def new_matcher(grammar: str, tokenizer: PreTrainedTokenizerBase, vocab: int, eos: Collection[int]) -> LLMatcher:
    """A parser at the grammar's beginning. The first for a tokenizer takes about a second.

    Args:
        grammar: as the functions above give it.
        vocab: of the model, which may have more tokens than the tokenizer.
        eos: the tokens that end an output.

    Raises:
        OptionError: the grammar has a mistake or matches nothing, llguidance is not installed or does not know this
            kind of tokenizer, or the model has no token that ends an output.
    """
    try:
        import llguidance.hf
    except ImportError as error:
        raise OptionError(f"grammars need the extra 'serve': pip install 'paceline[serve]' ({error})") from error
    require(bool(eos), "an output that follows a grammar ends by itself: this model has no token for that")
    key = (vocab, *sorted(eos))
    with _lock:
        known = _tokenizers.setdefault(tokenizer, {})
        if key not in known:
            try:
                known[key] = llguidance.hf.from_tokenizer(cast("Any", tokenizer), vocab, sorted(eos))
            except Exception as error:  # it has a reason of its own for each kind
                raise OptionError(f"grammars do not work with this tokenizer: {first_line(error)}") from error
        made = known[key] = known.pop(key)  # the last used is the last
        for oldest in list(known)[:-ENDS]:
            del known[oldest]
    return _compiled(made, grammar).deep_copy()


@lru_cache(COMPILED)
def _compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    require(not matcher.is_error(), f"the grammar cannot be used: {first_line(matcher.get_error())}")
    return matcher


class GrammarState:
    """Where one output stands in its grammar, and what may come next, there and after every drafted path.

    It is a function of the output's tokens alone, so that any draft is held to what plain decoding is held to. After
    a path that the grammar does not allow, which nothing can reach, all is allowed.

    Args:
        start: tokens of the prompt, which the grammar does not see.
        eos: tokens that end the output.

    Attributes:
        error: why the grammar cannot be followed any further, as when it is too complex.
    """

    def __init__(self, matcher: LLMatcher, vocab: int, eos: Collection[int], start: int) -> None:
        self.error: OptionError | None = None
        self._matcher, self._vocab, self._eos = matcher, vocab, frozenset(eos)
        self._settled = start  # tokens of prompt and output that the parser is behind for good
        self._tried: list[int] = []  # what it has read beyond

    def mask(
        self, scores: Float[Tensor, "nodes vocab"], ids: list[int], paths: Sequence[list[int]]
    ) -> Float[Tensor, "nodes vocab"]:
        """The scores with minus infinity for what may not come after `ids + paths[node]`."""
        bits = np.full((len(paths), -(-self._vocab // 8)), 255, dtype=np.uint8)
        for node, path in enumerate(paths):
            if self._read(ids, path):
                bits[node] = self._allowed()
        refused = np.unpackbits(~bits, axis=1, count=self._vocab, bitorder="little").view(bool)
        return scores.masked_fill(torch.from_numpy(refused).to(scores.device), -torch.inf)

    def refused(self, ids: list[int], tree: TokenTree) -> set[int]:
        """The nodes of a tree below `ids` that may not come there."""
        nodes = set[int]()
        for node in range(1, len(tree)):
            *before, token = [tree.tokens[above] for above in tree.path(node)[1:]]
            if token in self._eos:
                stands = self._read(ids, before) and self._matcher.is_accepting()
            else:
                stands = self._read(ids, [*before, token])
            if not stands:
                nodes.add(node)
        return nodes

    def forced(self, ids: list[int], most: int) -> list[int]:
        """The only tokens that may follow `ids`, one after another, as far as there is no choice; at most `most`."""
        found: list[int] = []
        while len(found) < most and self._read(ids, found):
            more = self._matcher.compute_ff_tokens() or self._only()
            if not more:
                break
            found += more
        return found[:most]

    def _only(self) -> list[int]:
        bits = np.unpackbits(self._allowed(), bitorder="little")
        return np.flatnonzero(bits).tolist() if bits.sum() == 1 else []

    def _allowed(self) -> np.ndarray:
        """One bit a token, in as many bytes as that takes."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: -(-self._vocab // 8)]
        self._note_error()
        return bits

    def _read(self, ids: list[int], path: Sequence[int]) -> bool:
        """Bring the parser past `ids + path`; whether the grammar allows that, and may say what comes next."""
        wanted, matcher = [*ids[self._settled :], *path], self._matcher
        same = common_length(wanted, self._tried)
        if same < len(self._tried):
            matcher.rollback(len(self._tried) - same)
            del self._tried[same:]
        more = wanted[same : next((at for at, token in enumerate(wanted) if token in self._eos), None)]
        self._tried += more[: matcher.try_consume_tokens(more)]
        whole = len(self._tried) == len(wanted)
        output = len(ids) - self._settled
        if output <= len(self._tried):  # which nothing takes back
            self._settled, self._tried = len(ids), self._tried[output:]
        self._note_error()
        return whole and self.error is None

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = OptionError(f"the grammar cannot be followed: {first_line(self._matcher.get_error())}")
