"""What one GPU does, by what is measured; `benchmarks/gpu.py` is its front."""
