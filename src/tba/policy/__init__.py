"""The policy as the trainer runs it: packed sequences in, log-probs with gradients out."""
