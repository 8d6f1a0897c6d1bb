"""Training heads: what each kind learns, where it starts, and what the frozen target shows it."""
