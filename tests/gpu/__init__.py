"""Tests: gpu."""
