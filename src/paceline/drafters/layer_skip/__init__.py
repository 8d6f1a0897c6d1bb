"""Self-speculative decoding: the target drafts with some of its sublayers left out."""
