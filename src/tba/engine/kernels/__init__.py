"""Triton kernels for CUDA. Imported only where a GPU is used; with TRITON_INTERPRET=1 they run on a CPU, for tests."""
