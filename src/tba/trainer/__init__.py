"""The trainer: its loop, batches, optimizer step, learning rate, collapse guard and checkpoints."""
