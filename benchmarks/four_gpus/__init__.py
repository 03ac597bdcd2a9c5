"""The parts of `benchmarks/qualify_4gpu.py`."""
