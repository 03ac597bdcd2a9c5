"""Every tolerance of the tests, and why it is what it is."""

# Time rows: fp32 cosine and sine of angles up to 1000; another libm differs in the last bit.
TIME_ROWS = {"rtol": 0.0, "atol": 1e-6}
# The same rows, stored as decimal numbers at true sizes.
TIME_ROWS_FULL = {"rtol": 0.0, "atol": 1e-5}
