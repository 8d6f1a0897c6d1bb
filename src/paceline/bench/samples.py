"""Sample outputs with the fate of every token: `samples.jsonl`, a line for each method's answer to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

from paceline.decoding.stats import TARGET
from paceline.decoding.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.bench.journal import Run

#: Fates. The target judges the children of every node that it accepts: those it would not have written are refused,
#: and what hangs below them is thrown away unjudged.
ACCEPTED, OWN, REFUSED, THROWN = "accepted", "target", "refused", "thrown"
SHOWN = 6  # drafted tokens of a round that did not become output, at most


class SampleRound(TypedDict):
    """Attributes: `tokens`, `[text, source, fate]` each, in reading order: accepted tokens, then the first branch that
    was not, then the target's own token. `refused` and `thrown` count such tokens of the whole tree.
    """

    tokens: list[tuple[str, str, str]]
    refused: int
    thrown: int


class SampleAnswer(TypedDict):
    """A line of `samples.jsonl`."""

    method: str
    task: str
    temperature: float
    id: str
    prompt: str
    rounds: list[SampleRound]


def sample(run: Run, prompt: str, tokenizer: PreTrainedTokenizerBase) -> SampleAnswer:
    """The answer to the first prompt of a call whose trees were kept."""
    return SampleAnswer(
        method=run.method,
        task=run.task,
        temperature=run.temperature,
        id=run.ids[0],
        prompt=prompt,
        rounds=list(_rounds(run, tokenizer)),
    )


def _rounds(run: Run, tokenizer: PreTrainedTokenizerBase) -> Iterator[SampleRound]:
    assert run.trees is not None
    assert run.rounds is not None
    output, stream = list(run.outputs[0]), TextStream(tokenizer)
    for (_, _, accepted, emitted), (tokens, parents, sources, path) in zip(run.rounds[0], run.trees[0], strict=True):
        new, output = output[:emitted], output[emitted:]
        texts = [stream.push(token) or _special(tokenizer, token) for token in new]
        if not output:
            texts[-1] += stream.flush()
        taken = path[1 : 1 + accepted]
        shown = [(text, sources[node], ACCEPTED) for text, node in zip(texts, taken, strict=False)]
        fates = _fates(parents, path, len(taken))
        shown += [
            (_text(tokenizer, tokens[parents[node]], tokens[node]), sources[node], fates[node])
            for node in _branch(parents, fates, path[len(taken)])
        ]
        shown += [(text, TARGET, OWN) for text in texts[accepted:]]
        counts = list(fates.values())
        yield SampleRound(tokens=shown, refused=counts.count(REFUSED), thrown=counts.count(THROWN))


def _fates(parents: list[int], path: list[int], accepted: int) -> dict[int, str]:
    """Of each node that did not become output."""
    judged, taken = set(path), set(path[: 1 + accepted])  # a path may go on after the end of the output
    return {
        node: REFUSED if parents[node] in judged and node not in judged else THROWN
        for node in range(1, len(parents))
        if node not in taken
    }


def _branch(parents: list[int], fates: dict[int, str], node: int) -> Iterator[int]:
    """First children of first children, starting below the last accepted node."""
    for _ in range(SHOWN):
        below = next((child for child in fates if parents[child] == node), None)
        if below is None:
            return
        yield (node := below)


def _special(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The name of a special token, which texts are without; nothing for half a character."""
    return str(tokenizer.decode([token])) if token in tokenizer.all_special_ids else ""


def _text(tokenizer: PreTrainedTokenizerBase, before: int, token: int) -> str:
    """A token's text after another: some tokenizers leave out the space in front of a first one."""
    both, first = (str(tokenizer.decode(ids)) for ids in ([before, token], [before]))
    return both.removeprefix(first)
