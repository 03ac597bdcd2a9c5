"""Weights that do not stay on the device: staged whole for a phase, or streamed layer by layer."""
