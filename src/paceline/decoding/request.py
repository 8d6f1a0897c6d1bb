"""A request in flight: its tokens, its sampling, its policy, its stop conditions and its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.decoding.logprobs import Logprob, logprobs_of
from paceline.decoding.sampling import NodeProcessors, Noise, Processor
from paceline.decoding.stats import TARGET, Stats
from paceline.decoding.text import Piece, TextStream
from paceline.decoding.verify import Outcome, Verification, draw
from paceline.errors import require
from paceline.targets.context import ENDLESS

if TYPE_CHECKING:
    from paceline.decoding.grammar import GrammarState
    from paceline.drafting.tree import TokenTree
    from paceline.policies.base import StoppingPolicy

VERIFIERS = ("auto", "match", "rejection")
CANCELLED, FAILED = "cancelled", "error"  # finish reasons of requests that were given up, or could not begin
NEW, NO_ROW = -1, -2  # the slot of a request that no engine has seen, and of one that waits or has left


def check_verifier(verifier: str) -> None:
    """Raises OptionError where there is none of that name."""
    require(verifier in VERIFIERS, f"unknown verifier '{verifier}'; there are {', '.join(VERIFIERS)}")


class Request:
    """One prompt being continued. It is the `Row` that drafters see.

    Args:
        ids: the prompt.
        limit: most new tokens.
        processors: of the target's logits, at every node.
        sampling: False for greedy decoding.
        eos: token ids that end the output.
        text: decodes the output as it comes; needed for streaming and for stop strings.
        stop_when: transformers-style criterion `(ids [1, n], None) -> bool tensor [1]`, asked after every token.
        verifier: how sampled output is verified. "match": sample at every node and follow, the choice for
            deterministic drafts; "rejection": speculative sampling; "auto": whichever accepts more.
        script: the output, known beforehand and followed whatever the target says: for replays.
        logprobs: record the target's log-probability of each output token, and so many of the likeliest beside it.
        drafter: which of a `Dispatch`'s drafters drafts for it; by default the first.
        prediction: tokens that the output is likely to have much of; a `Dispatch` drafts them.
        constraint: the grammar that the output must match; a `Dispatch` drafts what it forces.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        limit: int,
        policy: StoppingPolicy,
        processors: Sequence[Processor] = (),
        sampling: bool = False,
        eos: Sequence[int] = (),
        text: TextStream | None = None,
        stop_when: Callable[[Tensor, Any], Tensor] | None = None,
        seed: int | None = None,
        verifier: str = "auto",
        script: Sequence[int] | None = None,
        logprobs: int | None = None,
        drafter: str | None = None,
        prediction: Sequence[int] = (),
        constraint: GrammarState | None = None,
    ) -> None:
        require(len(ids) > 0, "the prompt is empty")
        require(limit >= 1, f"a request needs room for at least 1 new token, not {limit}")
        check_verifier(verifier)
        self.ids = list(ids)
        self.prompt_length = len(self.ids)
        self.limit, self.policy, self.sampling, self.verifier = limit, policy, sampling, verifier
        self.eos, self.text, self.stop_when = frozenset(eos), text, stop_when
        self._script = None if script is None else [*self.ids, *script]
        self.drafter, self.prediction = drafter, prediction
        self.top, self.logprobs = logprobs, list[Logprob]()
        self.constraint = constraint
        self.processors = NodeProcessors(processors, constraint.mask if constraint else None)
        self.noise = Noise(seed)
        policy.seed(self.noise.seed)
        self.stats = Stats(self.prompt_length)
        self.slot = NEW
        self.border = ENDLESS  # see `Target.border`
        self.state: Any = None
        self.finish_reason: str | None = None
        self.error: Exception | None = None  # why it could not begin or go on
        self.joined = 0.0  # when it got its row, by the clock that measures rounds
        self.last: tuple[TokenTree, list[int]] | None = None  # the latest round's tree and its accepted nodes
        self._undecoded: list[tuple[int, str]] = []  # output tokens and who proposed them
        self._unread: list[Piece] = []

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def is_new(self) -> bool:
        """Whether no engine has taken it up."""
        return self.slot == NEW and not self.finish_reason

    @property
    def room(self) -> int:
        """Most drafted tokens that can still become output: the target adds one itself."""
        room = self.limit - (len(self.ids) - self.prompt_length) - 1
        before = self.border - len(self.ids)
        return min(room, before) if before >= 0 else room

    @property
    def plain(self) -> bool:
        """Greedy decoding of raw logits: an argmax is all it takes."""
        return not self.sampling and not self.processors

    # -- what drafters use -----------------------------------------------------------------------------------------
    def distribution(self, logits: Float[Tensor, " vocab"], drafted: list[int]) -> Float[Tensor, " vocab"]:
        return self.processors(logits[None], self.ids, [drafted])[0].softmax(-1)

    def draw(self, q: Float[Tensor, " vocab"]) -> int:
        return draw(q, self.noise.draft()) if self.sampling else int(q.argmax())

    # -- what verification uses ------------------------------------------------------------------------------------
    def verification(self, tree: TokenTree) -> Verification:
        if self._script is not None:
            return Verification.SCRIPT
        if not self.sampling:
            return Verification.GREEDY if self.processors else Verification.ARGMAX
        match = self.verifier == "match" or (self.verifier == "auto" and not tree.sampled)
        return Verification.MATCH if match else Verification.REJECTION

    @property
    def temperature(self) -> float | None:
        return self.processors.temperature

    def scores(
        self, tree: TokenTree, logits: Float[Tensor, "nodes vocab"], nodes: Sequence[int] | None = None
    ) -> Float[Tensor, "_ vocab"]:
        tokens = tree.tokens
        some = range(len(tree)) if nodes is None else nodes
        paths = [[tokens[n] for n in tree.path(node)[1:]] for node in some]
        return self.processors(logits if nodes is None else logits[nodes], self.ids, paths)

    def script(self, tree: TokenTree) -> list[int]:
        assert self._script is not None
        return [self._script[len(self.ids) + depth] for depth in tree.depths]

    def position_uniforms(self, count: int) -> list[float]:
        return self.noise.positions(len(self.ids) - self.prompt_length, count)

    def uniform(self) -> float:
        return self.noise.verify()

    # -- output ----------------------------------------------------------------------------------------------------
    def accept(self, tree: TokenTree, outcome: Outcome) -> list[int]:
        """Append a round's tokens as far as no stop condition ends the output; returns those appended."""
        self.last = tree, outcome.path
        nodes = outcome.path[1:]
        tokens = [tree.tokens[node] for node in nodes] + [outcome.token]
        sources = [tree.sources[node] for node in nodes] + [TARGET]
        for count, (token, source) in enumerate(zip(tokens, sources, strict=True), start=1):
            self.ids.append(token)
            self.stats.sources.append(source)
            self.finish_reason = self._finished(token, source)
            if self.finish_reason:
                return tokens[:count]
        return tokens

    def record(self, logits: Float[Tensor, "tokens vocab"], tokens: Sequence[int]) -> None:
        """The target's raw logits that a round's output tokens were taken from, for those who ask for `logprobs`."""
        if self.top is not None:
            self.logprobs += logprobs_of(logits, tokens, self.top)

    def read(self) -> list[Piece]:
        """The text that has become certain since the last call, and who proposed it; at the end, what was held back.

        A character whose bytes are spread over tokens, and text held back for a stop string, count as the last token's.
        """
        self._decode()
        if self.text is not None and self.finish_reason and self.stats.sources:
            self._unread.append(Piece(self.text.flush(), self.stats.sources[-1]))
        pieces, self._unread = [piece for piece in self._unread if piece.text], []
        return pieces

    def _decode(self) -> None:
        """Make text of the tokens that came since the last time."""
        if self.text is not None:
            self._unread += [Piece(self.text.push(token), source) for token, source in self._undecoded]
            self._undecoded.clear()

    def _finished(self, token: int, source: str) -> str | None:
        if self.constraint and self.constraint.error:
            self.error = self.constraint.error
            return FAILED
        if token in self.eos:
            return "eos"
        if self.text is not None:
            self._undecoded.append((token, source))
            if self.text.stop:  # else it is time enough when somebody reads
                self._decode()
                if self.text.stopped:
                    return "stop"
        if self.stop_when is not None and bool(self.stop_when(torch.tensor([self.ids]), None).all()):
            return "stop"
        return "length" if len(self.ids) - self.prompt_length >= self.limit else None
