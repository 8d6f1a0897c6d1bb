"""What drafters learn from: prompts, the target's own answers to them, and their batches."""
