"""The round: draft, one target pass, verify, commit."""
