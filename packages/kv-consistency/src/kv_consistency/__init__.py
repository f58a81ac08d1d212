"""Causally consistent metadata for a distributed KV cache: clock, version vectors, update log, claims."""
