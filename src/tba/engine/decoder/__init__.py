"""Our own decoder: one forward pass for every family, on static tensors."""
