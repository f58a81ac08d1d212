"""Every bound of this package, each with its reason. What arrives from outside is compared with one before memory is
taken for it."""

from typing import Final

from kv_core import limits as core

MAX_LOGICAL: Final = (1 << 32) - 1
"""Logical part of a stamp: 32 bits; an overflow carries one nanosecond into the wall part."""

OFFSET_MAX_NS: Final = 500_000_000
"""How far a peer's stamp may lie beyond our own clock state: what NTP holds easily, and CockroachDB's default."""

JUMP_MAX_NS: Final = 500_000_000
"""How far a wall reading may run ahead of the monotonic clock before it counts as a forward jump."""

JOIN_OFFSET_MAX_NS: Final = 24 * 3600 * 1_000_000_000
"""How far beyond its own wall a joining node follows its peers' stamps: walls set back by up to a day."""

CLOCK_HORIZON_NS: Final = 2_000_000_000
"""How far ahead the persisted bound of stamps is set: one small write a second. A restart begins at the bound and waits
until peers take its stamps (`hlc.restart_wait_ns`), so this is also the longest that a restart waits."""

MAX_TOKEN_DOTS: Final = 64
"""Dots in one causal token, one for each origin: about 2 KiB at most, it travels with every request."""

MAX_TOKEN_BYTES: Final = 32 * core.KIB
"""A causal token in bytes, with the longest node names."""

MAX_DEPENDENCIES: Final = 256
"""Dots one update may depend on: a token, and purges seen since the last own update."""

MAX_ORIGINS: Final = 4096
"""Lives of nodes that one replica follows; a vector of that many is about 100 KiB."""

MAX_OPS_PER_UPDATE: Final = 256
"""Runs of blocks, entries or purges in one update; what is longer is several updates."""

MAX_BLOCKS_PER_RUN: Final = 4096
"""Blocks of one run: 80 KiB of names."""

MAX_UPDATES_PER_BATCH: Final = 4096
"""Updates of one message; the byte bound usually ends it first."""

MAX_REPLY_BYTES: Final = 512 * core.KIB
"""What one answer of anti-entropy carries: below a bus message by far, so that it never delays others for long."""

MAX_UPDATE_BYTES: Final = core.MIB
"""One update on the wire; it is sent whole."""

MAX_POSITION: Final = (1 << 24) - 1
"""Position of a block in its sequence: a million tokens in blocks of one need 20 bits."""

MAX_DOT: Final = (1 << 48) - 1
"""Updates of one life of a node: at a million a second, nine years."""

MAX_SHAPE_BYTES: Final = 32
"""How a block lies (layout, ranks, layers), as its holder encodes it; compared, never read."""

MAX_SCOPES: Final = 8
"""Names besides its own under which a namespace can be purged: tenant, model, weights, adapter."""

MAX_NAMESPACES: Final = 1 << 16
"""Namespaces whose claims one replica keeps; those of which nothing is claimed any more make room. Claims of further
ones are not kept, so their blocks are not found elsewhere."""

MAX_RAISES: Final = 1 << 18
"""Pairs of a scope and an origin that purged it, kept for ever: a purge an hour by each of four gateways for seven
years."""

MAX_CLAIMS_PER_SHELF: Final = 1 << 22
"""Blocks that one holder may claim in one namespace and tier; a 256th of them still fits one message."""

MAX_ENTRIES: Final = 1 << 21
"""Requests that one replica follows, ended ones included until every member knows that they ended."""

MAX_FORGOTTEN: Final = 1 << 16
"""Ended requests whose names are remembered after everybody knows that they ended, so that a late writer is told."""

MAX_NODES_PER_ENTRY: Final = 64
"""Storage nodes of one entry."""

MAX_WAITERS: Final = 1 << 16
"""Reads that wait at one replica."""

MAX_PARKED_UPDATES: Final = 1 << 16
MAX_PARKED_BYTES: Final = 32 * core.MIB
"""The causal buffer. At the bound an update is dropped and fetched again later."""

MAX_LOG_BYTES: Final = 64 * core.MIB
"""All logs of one replica together, in wire bytes (about three times that in memory)."""

MAX_RANGES_OUTSTANDING: Final = 64
"""Gaps that are being asked for at once."""

DIGEST_INTERVAL_NS: Final = 200_000_000
"""How often a replica compares itself with one peer, in turn."""

GAP_GRACE_NS: Final = 20_000_000
"""How long a gap may fill by itself before it is asked for."""

REPLY_TIMEOUT_NS: Final = 1_000_000_000
"""After this an unanswered question goes to another peer."""

RETIRE_AFTER_NS: Final = 10_000_000_000
"""How long a life that is over is mentioned at least: longer than any message stays under way."""
