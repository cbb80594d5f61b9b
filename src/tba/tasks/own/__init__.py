"""A user's own problem: prompts from a file, rewards from Python functions."""
