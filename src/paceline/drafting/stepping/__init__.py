"""Heads that draft step by step on states of their own: what the drafters `eagle` and `mtp` share."""
