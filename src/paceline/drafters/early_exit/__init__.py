"""Early exit (EESD): the target's first layers and a small trained head draft, and the target goes on from there."""
