"""Tests: embedded."""
