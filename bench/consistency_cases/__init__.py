"""The cases of `bench/consistency.py` that need a file of their own."""
