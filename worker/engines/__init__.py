"""The engines that a rank can load: `magi2` (the real one), and `null` and `chaos` for tests only."""
