"""Sample outputs as a page shows them: who proposed each token, and what was refused (EESD's figure 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from paceline.bench.samples import ACCEPTED, OWN, REFUSED, THROWN, SampleAnswer
from paceline.decoding.stats import TARGET
from paceline.report import Section, colour, swatch

OPEN = 1  # samples that are shown at once
ABOUT = {
    OWN: "the model's own token",
    REFUSED: "proposed, and refused: the model wrote something else",
    THROWN: "thrown away unread, after a refused one",
}


def provenance(answers: Sequence[SampleAnswer]) -> Section:
    """A section with each method's answer to the first prompt of each task."""
    sources = dict.fromkeys(
        source for answer in answers for one in answer["rounds"] for _, source, _ in one["tokens"] if source != TARGET
    )
    colours = {source: number for number, source in enumerate(sources, start=1)}
    parts = [
        '<input type="checkbox" class="hide" id="hide"> <label class="check" for="hide">hide what was refused</label>',
        _legend(colours),
    ]
    prompts = dict.fromkeys((answer["task"], answer["temperature"], answer["id"]) for answer in answers)
    for number, key in enumerate(prompts):
        own = [answer for answer in answers if (answer["task"], answer["temperature"], answer["id"]) == key]
        parts.append(_prompt(own, colours, number < OPEN))
    return Section(
        "Sample outputs",
        "Who proposed each token of the first prompt of each task. A smaller token that is struck out was proposed in "
        "this place and did not become output; of a tree, only one branch is shown.",
        body=Markup("\n").join(map(Markup, parts)),
    )


def _legend(colours: dict[str, int]) -> Markup:
    items = [swatch(f"proposed by {source}", number) for source, number in colours.items()]
    fates = [Markup('<span class="{}">{}</span>').format(fate, about) for fate, about in ABOUT.items()]
    listed = Markup().join(Markup("<li>{}</li>").format(item) for item in [*items, *fates])
    return Markup('<ul class="legend answer">{}</ul>').format(listed)


def _prompt(answers: Sequence[SampleAnswer], colours: dict[str, int], is_open: bool) -> Markup:
    first = answers[0]
    at = f", temperature {first['temperature']:g}" if first["temperature"] else ""
    parts = [_answer(answer, colours) for answer in answers]
    return Markup('<details class="sample"{}><summary>{} ({}{})</summary><p class="prompt">{}</p>{}</details>').format(
        Markup(" open" if is_open else ""), first["task"], first["id"], at, first["prompt"], Markup().join(parts)
    )


def _answer(answer: SampleAnswer, colours: dict[str, int]) -> Markup:
    fates = Counter(fate for one in answer["rounds"] for _, _, fate in one["tokens"] if fate in (ACCEPTED, OWN))
    refused, thrown = (sum(one[kind] for one in answer["rounds"]) for kind in ("refused", "thrown"))
    passes = len(answer["rounds"])
    counts = f"{fates.total()} tokens in {passes} passes: {fates[ACCEPTED]} accepted, {fates[OWN]} of the model's own"
    return Markup('<h3>{}</h3><p class="about">{}; {} refused, {} thrown away</p><p class="answer">{}</p>').format(
        answer["method"], counts, refused, thrown, Markup().join(_tokens(answer, colours))
    )


def _tokens(answer: SampleAnswer, colours: dict[str, int]) -> Iterable[Markup]:
    for number, one in enumerate(answer["rounds"], start=1):
        for text, source, fate in one["tokens"]:
            kind = f"{fate} {colour(colours[source])}" if source in colours else fate
            told = f"pass {number}: {'the model' if fate == OWN else source}"
            yield Markup('<span class="{}" title="{}">{}</span>').format(kind, told, text)
