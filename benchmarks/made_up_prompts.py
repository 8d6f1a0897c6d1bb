"""Prompts of kinds that few permissive data sets have, made up from open text by the model itself.

Summaries of passages, questions about passages (as in retrieval-augmented generation), and translations of what the
model takes for German. `paceline train data` lets the model answer them; nothing of a prompt is learnt.

    python benchmarks/made_up_prompts.py corpus_text_books.jsonl --count 400 --out made_up_prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.files import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK = "Write one short question that this text answers. Write nothing but the question.\n\n{}"
TRANSLATE = "Translate English to German: {}"


def main() -> None:
    """Write `--count` prompts of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help='JSONL with a "text" in each row')
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=400, help="of each kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    passages = [json.loads(line)["text"] for line in arguments.corpus.read_text().splitlines()]
    llm = paceline.load(arguments.model, drafter="none")

    def answers(form: str, texts: list[str]) -> Iterator[str]:
        """The model's answer to each text, its first line."""
        for at in range(0, len(texts), arguments.batch):
            prompts = [form.format(text) for text in texts[at : at + arguments.batch]]
            for result in llm.generate(prompts, chat=True, max_new_tokens=64):
                yield result.text.strip().split("\n")[0]

    def pieces(length: int) -> list[str]:
        """Random pieces of the passages that begin and end with whole words."""
        drawn = (draw.choice(passages) for _ in range(arguments.count))
        starts = ((text, draw.randrange(max(1, len(text) - length))) for text in drawn)
        return [" ".join(text[at : at + length].split()[1:-1]) for text, at in starts]

    rows = [f"Summarize: {piece}" for piece in pieces(1500)]
    first, others = pieces(700), [pieces(500) for _ in range(2)]
    for passage, question, *more in zip(first, answers(ASK, first), *others, strict=True):
        shown = draw.sample([passage, *more], 3)
        listed = "\n".join(f"[{number}] {text}" for number, text in enumerate(shown, 1))
        rows.append(f"Answer the question by the passages.\n\n{listed}\n\nQuestion: {question}")
    sentences = pieces(150)
    rows += [f"Translate German to English: {german}" for german in answers(TRANSLATE, sentences)]
    with whole(arguments.out) as file:
        file.write_text("".join(json.dumps({"prompt": row}, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
