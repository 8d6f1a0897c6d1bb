"""One answer, and what drafting did for it.

python examples/generate.py [MODEL]
"""

import sys
from pathlib import Path

import paceline

prompt = (Path(__file__).parent / "fix-bug.txt").read_text()  # an edit: much of the answer stands in the prompt

llm = paceline.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")  # or a hub id, a folder, a GGUF file
fast = llm.generate(prompt, max_new_tokens=96)
slow = llm.method("none").generate(prompt, max_new_tokens=96)  # the same weights, without drafts

print(fast.text)
print(f"\n{fast.stats.accepted} of {fast.stats.tokens} tokens were drafted: {fast.stats.tau:.2f} tokens a pass")
print(f"{fast.stats.tokens_per_s:.0f} tokens/s, without drafts {slow.stats.tokens_per_s:.0f}")
print("the same tokens" if fast.tokens == slow.tokens else "other tokens: please report this")
