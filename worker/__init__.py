"""The GPU side of the farm: agent, ranks, ticker and webhook sender."""
