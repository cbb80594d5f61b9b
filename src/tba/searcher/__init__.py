"""The searcher: it draws prompts, generates and scores responses, and sends them to the trainer as groups."""
