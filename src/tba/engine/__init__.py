"""Engines: prompts in, responses with log-probs and version spans out."""
