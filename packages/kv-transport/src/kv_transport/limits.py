"""The bounds of kv-transport, each with its reason."""

from typing import Final

from kv_core.limits import KIB, MIB

UNIT_BYTES: Final = 4 * MIB
"""A transfer unit: small enough that urgent work overtakes soon, large enough that per-unit cost vanishes."""

UNIT_SHARE_BYTES: Final = 8 * MIB
"""Of a unit over shared memory for each thread that copies: as soon done, and the cost around a unit weighs more."""

UNIT_BYTES_MAX: Final = 16 * MIB
"""The most of any unit."""

CELLS_PER_UNIT_MAX: Final = 2048
"""Pieces with a CRC of their own in one unit: their checksums (16 KiB) and offsets fit one control frame."""

WINDOW_SIZE: Final = 8
"""Units in flight per peer."""

WINDOW_BYTES: Final = 64 * MIB
"""Bytes in flight per peer from which no further unit joins: what urgent work may have to wait for."""

COPY_PIECE_BYTES: Final = 1 * MIB
"""Bytes copied at a time: the most of plain memory that one checksum is for."""

INLINE_COPY_BYTES_MAX: Final = 64 * KIB
"""A copy that is cheaper on the loop (about 10 us) than handed to a thread."""

LZ4_SAMPLE_BYTES: Final = 64 * KIB
"""What LZ4 is tried on before a transfer's first unit: about 100 us on the loop."""

CONTROL_FRAME_BYTES_MAX: Final = 128 * KIB
"""One control frame; below the default send buffer of a unix socket (208 KiB), or it could never be sent."""

NOTIF_BYTES_MAX: Final = 64 * KIB
"""The application's bytes in one notification."""

NOTIFS_MAX: Final = 4096
"""Notifications that wait for `notifs()`; further ones are dropped and counted."""

SLOTS_MAX: Final = 1 << 26
"""Slots of an arena: 64 Mi blocks of 16 tokens are a thousand million tokens."""

LEASES_MAX: Final = 1024
"""Read leases alive at once; the table is part of an arena's mapping."""

GRANTS_MAX: Final = 4096
"""Write grants open at once."""

POSITIONS_PER_TICKET_MAX: Final = 1 << 16
"""Blocks in one grant or lease: the longest sequence in blocks of 16 tokens."""

REGIONS_MAX: Final = 1024
"""Registered regions of one agent."""

PEERS_MAX: Final = 1024
"""Introduced peers of one agent."""

REPLAY_WINDOW: Final = 1024
"""Nonces below the newest one that are still told apart: far more than can be reordered by several streams."""

PUT_WINDOW: Final = 16 * 1024
"""Puts below the newest one of a peer of which it is known whether their notification was given out: 16 KiB a peer."""

QUARANTINE_SLOTS_MAX: Final = 1024
"""Slots that wait for a fence, per peer, before that peer is offered tcp only."""

CHECKSUM_RETRIES_MAX: Final = 3
"""Attempts after the first that a unit with bad bytes gets."""

QUEUED_UNITS_MAX: Final = 1 << 17
"""Units waiting at one peer: half a TiB of work."""

PENDING_HANDSHAKES_MAX: Final = 64
"""Connections that have not yet proved whose they are; further ones are closed at once."""

HANDSHAKE_BYTES_MAX: Final = 1 * KIB
"""Bytes read from a connection before it has proved whose it is."""

SESSIONS_PER_PEER_MAX: Final = 64
"""Connections of one peer (several streams, and reconnection overlapping with the old ones)."""

KEEPALIVE_IDLE_S: Final = 30
KEEPALIVE_INTERVAL_S: Final = 5
"""An idle TCP connection is probed so long after its last byte; one probe without an answer is enough to end it at the
next, because `TCP_USER_TIMEOUT` is over by then. A process that stands still answers: its kernel does."""
