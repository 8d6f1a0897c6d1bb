"""EAGLE: a small trained decoder drafts from the target's last hidden states, autoregressively."""
