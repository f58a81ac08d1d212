"""Talk to a KV node from an engine."""
