"""Tests: service, api."""
