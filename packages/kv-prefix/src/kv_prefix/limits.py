"""Every bound of kv-prefix, with its reason."""

from typing import Final

from kv_core.limits import GIB

MAX_SLOTS: Final = 1 << 27
"""Slots of one pool: 128 Mi blocks of 16 tokens are more than any host's memory holds."""

MAX_OWNER_CHARS: Final = 256
"""Length of the name of whoever holds blocks; it is listed to operators."""

MAX_LEASES_PER_READER: Final = 4_096
"""Read leases of one reader: more outstanding pulls than that is a reader that leaks."""

MAX_LEASES: Final = 65_536
"""Read leases of one pool."""

MAX_HOLDERS: Final = 1_024
"""(node, incarnation) pairs that one index follows, the ones being swept out included."""

MAX_REMOVAL_RECORDS: Final = 65_536
"""Removed blocks of which a node remembers when and why, to explain a miss. About 20 MB."""

DEFAULT_MAX_CACHE_BYTES: Final = 40 * GIB
"""Capacity of a prefix cache unless told otherwise: 40 GiB."""

DEFAULT_MIN_MATCH_TOKENS: Final = 128
"""A shorter match is not worth the bookkeeping of a remote read."""

DEFAULT_LEASE_NS: Final = 30_000_000_000
"""A read lease lasts 30 s unless renewed: the slowest pull of one prompt over a 1 Gb/s link."""

MAX_IN_FLIGHT_BLOCKS: Final = 262_144
"""Announced blocks that are not ready yet: four million tokens of prompts in computation at once."""

MAX_ACCOUNTS: Final = 4_096
"""Tenants whose blocks one pool counts."""

MAX_ACCOUNT_NAMESPACES: Final = 65_536
"""Namespaces of which a pool remembers whose they are; a forgotten one is asked for again."""
