"""Room for what is kept of texts."""

from __future__ import annotations

import torch

from paceline.decoding.blocks import BLOCK, TokenBlocks
from paceline.targets.cache import CacheShape, KVCache


def filled(tokens: int, seed: int) -> KVCache:
    row = KVCache.allocate(CacheShape(2, 1, 4), 1, tokens, torch.float32, torch.device("cpu"))
    row.store.normal_(generator=torch.Generator().manual_seed(seed))
    return row


def test_it_takes_memory_as_texts_come() -> None:
    """A model may have room for far more than anybody says to it; what is there stays as there comes more."""
    blocks, texts = TokenBlocks(2**31), {}
    for seed, tokens in enumerate((40, 3, 200, 1000)):
        row = filled(tokens, seed)
        hidden = {1: torch.full((tokens, 5), float(seed))}
        texts[seed] = row, blocks.put(row, tokens, hidden)
    assert blocks._taken * BLOCK < 4000
    for seed, (row, places) in texts.items():
        back = filled(row.capacity, 9)
        hidden_again = blocks.get(places, row.capacity, back, [1])
        assert torch.equal(back.store, row.store)
        assert torch.equal(hidden_again[1], torch.full((row.capacity, 5), float(seed)))


def test_it_gives_out_no_more_than_it_may() -> None:
    blocks = TokenBlocks(3 * BLOCK)
    assert blocks.fits(3 * BLOCK)
    assert not blocks.fits(3 * BLOCK + 1)
    places = blocks.put(filled(2 * BLOCK, 0), 2 * BLOCK, {})
    assert blocks.fits(BLOCK)
    assert not blocks.fits(BLOCK + 1)
    blocks.give_back(places)
    assert blocks.fits(3 * BLOCK)
