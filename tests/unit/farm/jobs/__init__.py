"""Tests of farm/jobs."""
