"""The HTTP front of the farm."""
