"""Cases of `bench/prefix.py` that need a file of their own."""
