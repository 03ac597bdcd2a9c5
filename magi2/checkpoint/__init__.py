"""Checkpoint folders: their layout and tensors, strict loading, verification, and the tiny random one."""
