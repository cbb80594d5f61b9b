"""Triton kernels for CUDA. They are imported only where a GPU is used. With TRITON_INTERPRET=1 tests run them on a CPU."""
