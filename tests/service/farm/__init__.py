"""Tests of farm."""
