"""The sides and the figures of `bench/claim.py`."""
