"""Cases for Triton's interpreter: only `test_interpreted.py` runs them, in processes of their own."""
