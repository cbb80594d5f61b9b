"""The native engine: our own decoder over slots of a key-value cache, with CUDA graphs on a GPU."""
