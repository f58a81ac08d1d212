"""Types, arithmetic, identity, hashing and wire form of a distributed KV cache."""
