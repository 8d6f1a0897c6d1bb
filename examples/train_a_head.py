"""A drafter of your own: the model answers prompts, a head learns from its answers, and drafts.

python examples/train_a_head.py [FOLDER [MODEL]]

Some minutes on two cores: enough to see it work, far too little for a good head (docs/training.md). Start it again
after a stop, and it goes on. By hand it is the three commands that it prints.
"""

import json
import shlex
import sys
from pathlib import Path

import paceline
from paceline.cli import main

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "my-head")
model = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
folder.mkdir(parents=True, exist_ok=True)

things = ["a bicycle", "the sea", "bread", "a mountain", "winter", "a library", "the moon", "tea", "a bridge", "music"]
questions = ["What is {}?", "Write two sentences about {}.", "Why do people like {}?", "Tell a child about {}."]
prompts = [{"prompt": question.format(thing)} for question in questions for thing in things]
(folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))

head, here, of_model = f"eagle:head={folder}/eagle", shlex.quote(str(folder)), f"--model {shlex.quote(model)}"
commands = [
    f"train data --prompts {here}/prompts.jsonl -n 128 --out {here}/data",
    f"train eagle --data {here}/data --vocab 4096 --report 12 --held-back 4 --out {here}/eagle --resume",
    f"generate 'What is a mountain?' -n 64 --drafter {shlex.quote(head)} --policy fixed:k=2",
]
for command in commands:
    print(f"\npaceline {command} {of_model}", flush=True)
    if failed := main(shlex.split(f"{command} {of_model}")):
        sys.exit(failed)

llm = paceline.load(model, drafter=head, policy="fixed:k=2")
stats = llm.generate("Why do people like winter?", max_new_tokens=64).stats
print(f"\nfrom Python: {stats.tau:.2f} tokens a pass, {stats.accepted} of {stats.drafted} drafted tokens were right")
