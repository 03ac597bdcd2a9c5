"""The engine: MAGI-2 Preview in PyTorch, as a library and a command (`python -m magi2`). Importing it loads no torch."""
