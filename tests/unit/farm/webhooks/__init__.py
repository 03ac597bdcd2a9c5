"""Tests: unit, farm.webhooks."""
