"""Reads for operators, across all accounts: how the farm is doing, and where what is. Nothing here writes."""
