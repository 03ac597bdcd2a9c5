"""Implementations that need a CUDA device; only modules directly in `kernels` may import them."""
