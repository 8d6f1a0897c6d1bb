"""An OpenAI-compatible server on the steppable engine."""
