"""Red-teaming: an attacker learns to write prompts that make a victim say what a judge objects to."""
