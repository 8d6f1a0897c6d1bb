"""Speculative decoding for transformers models: drafters, stop policies and lossless verification."""
