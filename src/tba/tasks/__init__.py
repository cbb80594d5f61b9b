"""Tasks: problems with their prompts, rewards, graders and evaluations."""
