"""A whole cluster's metadata in one process and virtual time, under seeded faults."""
