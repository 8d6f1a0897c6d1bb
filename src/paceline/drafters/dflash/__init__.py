"""DFlash: a block of tokens in one pass of a small decoder that reads the target's hidden states."""
