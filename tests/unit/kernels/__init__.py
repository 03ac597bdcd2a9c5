"""Tests: kernels."""
