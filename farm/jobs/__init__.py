"""Jobs: their states, the one writer of state, and everything that reads or moves a job row."""
