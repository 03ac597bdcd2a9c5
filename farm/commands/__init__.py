"""The commands of `magi2-farm`, one module each.

`add_to(subcommands)` declares the command; its handler returns the exit code. Handlers print for people on
stderr and results on stdout; with `--json` stdout is JSON alone. What goes wrong in a way that a person can
mend is a `CommandError` or a `FarmError`, shown as one line.
"""
