"""Tests: webhooks on a real database, against a receiver of the tests' own."""
