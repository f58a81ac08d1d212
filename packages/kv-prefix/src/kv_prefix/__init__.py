"""Prefix index, block pool, eviction and tiers of a distributed KV cache."""
