"""Tests of farm/db."""
