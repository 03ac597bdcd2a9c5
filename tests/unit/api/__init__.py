"""Tests: unit, api."""
