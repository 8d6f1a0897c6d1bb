"""A drafter of your own: it proposes what followed the last token where that stood before.

python examples/own_drafter.py [MODEL]

To give it a name for the command line, options and a policy of its own, see `examples/plugin`.
"""

import sys
from collections.abc import Sequence

import paceline
from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree


class Before(Drafter):
    """The tokens that followed the last one where it stood before."""

    source = "before"  # whose tokens these are, in statistics

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self.proposed(row) for row in rows]

    def proposed(self, row: Row) -> TokenTree:
        *text, root = row.ids  # the prompt and the answer so far
        tree, node = TokenTree.root(root), 0
        if root in text:
            at = len(text) - 1 - text[::-1].index(root)
            for token in row.ids[at + 1 :][: row.room]:  # room: how many a draft may have
                if not row.policy.more(tree.depth):
                    break
                node = tree.add(token, node, self.source)
        return tree


llm = paceline.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", drafter=Before, policy="fixed:k=2")
out = llm.generate("Write the word paceline ten times.", max_new_tokens=64)
print(out.text)
print(f"\n{out.stats.tau:.2f} tokens a pass; {out.stats.accepted} of {out.stats.drafted} drafted tokens were right")
