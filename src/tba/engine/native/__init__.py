"""The native engine: our own decoder over slots of a key/value cache, with CUDA graphs where there is a GPU."""
