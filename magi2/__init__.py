"""The engine: MAGI-2 Preview in PyTorch, a library and a command, `python -m magi2`. Loads no torch."""
