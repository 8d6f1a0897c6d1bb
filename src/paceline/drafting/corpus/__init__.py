"""Corpora: their texts, streamed, and what is built of their tokens."""
