"""The commands of `python -m magi2`, a module each: `add_to` declares one, its `run` gives the exit code."""
