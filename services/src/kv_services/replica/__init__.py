"""kv-consistency as a part of a process: one replica, fed by the bus, feeding the prefix index."""
