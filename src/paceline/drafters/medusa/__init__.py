"""Medusa: heads on the target's last hidden state, each of which guesses the token at its own distance ahead."""
