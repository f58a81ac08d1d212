"""The cases of `bench/transport.py`, by what they measure."""
