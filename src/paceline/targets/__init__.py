"""Target models: loading by name, and their blocks for decoding."""
