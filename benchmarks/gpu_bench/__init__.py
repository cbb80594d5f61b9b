"""What one GPU does, by what is measured; `benchmarks/gpu.py` and `benchmarks/vllm_side_by_side.py` are the fronts."""
