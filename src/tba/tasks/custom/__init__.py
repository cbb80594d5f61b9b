"""The task `custom`: a user's prompts from a JSONL file, rewards from the user's Python functions."""
