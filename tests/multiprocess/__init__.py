"""Tests: multiprocess."""
