"""The monitor: judges the health of a cluster from what its processes say of themselves; nothing depends on it."""
