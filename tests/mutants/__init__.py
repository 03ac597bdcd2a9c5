"""Breaks that are planted to see whether the tests catch them."""
