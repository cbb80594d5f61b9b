"""Engines: they take prompts, and return responses with log-probs and version spans."""
