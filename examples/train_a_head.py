"""A drafter of your own: the model answers prompts, a head learns from its answers, and drafts.

python examples/train_a_head.py [FOLDER]

Some minutes on two cores: enough to see it work, far too little for a good head (docs/training.md). Start it again
after a stop, and it goes on. By hand it is the three commands that it prints.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import paceline

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "my-head")
folder.mkdir(parents=True, exist_ok=True)

things = ["a bicycle", "the sea", "bread", "a mountain", "winter", "a library", "the moon", "tea", "a bridge", "music"]
questions = ["What is {}?", "Write two sentences about {}.", "Why do people like {}?", "Tell a child about {}."]
prompts = [{"prompt": question.format(thing)} for question in questions for thing in things]
(folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))

commands = [
    f"train data --prompts {folder}/prompts.jsonl -n 128 --out {folder}/data",
    f"train eagle --data {folder}/data --vocab 4096 --steps 60 --report 20 --held-back 4 --out {folder}/eagle --resume",
    f"generate 'What is a mountain?' -n 64 --drafter eagle:head={folder}/eagle --policy fixed:k=2",
]
for command in commands:
    print(f"\npaceline {command}", flush=True)
    subprocess.run([sys.executable, "-m", "paceline", *shlex.split(command)], check=True)

llm = paceline.load(drafter=f"eagle:head={folder}/eagle", policy="fixed:k=2")
stats = llm.generate("Why do people like winter?", max_new_tokens=64).stats
print(f"\nfrom Python: {stats.tau:.2f} tokens a pass, {stats.accepted} of {stats.drafted} drafted tokens were right")
