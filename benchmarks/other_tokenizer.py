"""A copy of a model with another tokenizer, as a draft model to try what translating texts costs.

    python benchmarks/other_tokenizer.py FOLDER [--model smollm2-135m] [--merges 20000]
    paceline bench --suite PROMPTS.jsonl --methods ar,draft-model:model=FOLDER+fixed:k=4 --out RESULTS

The tokenizer keeps the first merges only, so that rarer words fall into more tokens, and numbers all tokens anew. The
weights are the model's own: with the model's own tokenizer every draft would be right (greedy), so that what is missing
is what the other tokenizer costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from script import run_script
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.errors import OptionError, require
from paceline.targets.sources import load_model


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--merges", type=int, default=20_000, help="of the tokenizer's that are kept")
    options = parser.parse_args()
    require(not options.folder.exists(), f"{options.folder} exists")
    model, tokenizer = load_model(options.model)
    smaller, kept = shortened(tokenizer, options.merges)
    take_rows(model, kept)
    for role in ("bos", "eos", "pad"):
        setattr(model.config, f"{role}_token_id", getattr(smaller, f"{role}_token_id"))
        setattr(model.generation_config, f"{role}_token_id", getattr(smaller, f"{role}_token_id"))
    model.save_pretrained(options.folder)
    smaller.save_pretrained(options.folder)
    print(f"{options.folder}: {len(kept)} of {len(tokenizer)} tokens")


def shortened(tokenizer: PreTrainedTokenizerFast, merges: int) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer with its first merges only, and the ids that its tokens had, in the order of their new ones."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model = spec["model"]
    if model["type"] != "BPE" or not 0 < merges < len(model["merges"]):
        raise OptionError(f"need a BPE tokenizer with more than {merges} merges")
    made = {"".join(pair) for pair in model["merges"]}
    first = {"".join(pair) for pair in model["merges"][:merges]}
    names = sorted(name for name in model["vocab"] if name in first or name not in made)
    kept = [model["vocab"][name] for name in names]
    model["merges"] = model["merges"][:merges]
    model["vocab"] = {name: at for at, name in enumerate(names)}
    for added in spec["added_tokens"]:
        added["id"] = model["vocab"][added["content"]]
    roles = {f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "unk")}
    smaller = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), **roles)
    smaller.chat_template = tokenizer.chat_template
    return smaller, kept


def take_rows(model: PreTrainedModel, kept: list[int]) -> None:
    """Leave the model these tokens of its vocabulary, in this order."""
    wide, tied = model.get_input_embeddings().weight.data, model.config.tie_word_embeddings
    output = model.get_output_embeddings().weight.data
    model.resize_token_embeddings(len(kept))
    model.get_input_embeddings().weight.data.copy_(wide[kept])
    if not tied:
        model.get_output_embeddings().weight.data.copy_(output[kept])


if __name__ == "__main__":
    run_script(main)
