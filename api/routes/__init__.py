"""The routes, one module per family of paths."""
