"""Tests of the benchmarks: what they make of their numbers."""
