"""Text as it comes, coloured by who drafted it: grey is the model's own, green was drafted and accepted.

python examples/stream.py [MODEL]
"""

import sys

import paceline
from paceline.decoding.engine import Engine

GREY, GREEN, END = "\033[90m", "\033[32m", "\033[0m"

llm = paceline.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
prompt = "Write a Python class Stack with push, pop and peek. Then write it again with a docstring in each method."

# Where only the text is wanted, one line does: `for piece in llm.stream(prompt): ...`
engine = Engine(llm.target, llm.drafter)
[request] = llm.requests([prompt], max_new_tokens=128, temperature=0.3, seed=1)
engine.add(request)
while not engine.idle:
    engine.step()  # one round: a draft, and one pass of the model
    for text, source in request.read():  # what has become certain
        print(f"{GREY if source == 'target' else GREEN}{text}{END}", end="", flush=True)
print(f"\n{request.stats.tau:.2f} tokens a pass of the model")
