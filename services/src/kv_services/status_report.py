"""What every process answers on `/status`: the one shape that the services write and `kvctl status` reads.

Fields a role has no use for keep their defaults; readers skip fields they don't know.
"""

from typing import Literal

import msgspec


class SlotCounts(msgspec.Struct, frozen=True):
    """Slots of a node's arena by state; `free + cached + pinned + quarantined == total`."""

    total: int
    free: int
    cached: int
    pinned: int
    quarantined: int = 0


class TierCounts(msgspec.Struct, frozen=True):
    """One slower tier of a node, in blocks.

    Attributes:
        blocks: that can be loaded.
        limit: that it may hold now; below its configured size after it met a full medium.
        used_bytes: taken on the medium.
        waiting: to be written.
        spilled, missed, failed: written; evicted before their turn; not written because the medium failed.
        absent: found damaged, short or gone when they were to be loaded.
        full: the last write found no room on the medium.
        choice: the last comparison of loading with computing, in one sentence.
    """

    blocks: int
    limit: int
    used_bytes: int
    waiting: int = 0
    spilled: int = 0
    missed: int = 0
    failed: int = 0
    absent: int = 0
    full: bool = False
    choice: str = ""


class StatusReport(msgspec.Struct, frozen=True):
    """One process, as it sees itself and the others.

    Attributes:
        node: its id in the cluster file.
        role: its role there.
        state: `starting` until it can do its work, `degraded` when it works but an alarm is up.
        incarnation: this life of the process.
        uptime_s: seconds since it started.
        slots: of its arena; none for a role that holds no KV.
        tiers: its slower tiers by name.
        running: requests being worked on.
        waiting: requests that wait for slots or a turn.
        transports: the transport in use to each peer that KV moved to or from, by the peer's id.
        members: what it thinks of the others: `unseen`, `alive`, `suspect`, `dead` or `refused`, by their ids.
        alerts: thresholds that are crossed now, one sentence each.
        open: what it owns and has not given back yet (pins, leases, futures, sockets), by kind.
    """

    node: str
    role: str
    state: Literal["starting", "ready", "degraded", "draining"]
    incarnation: int = 0
    uptime_s: float = 0.0
    slots: SlotCounts | None = None
    running: int = 0
    waiting: int = 0
    transports: dict[str, str] = {}
    members: dict[str, str] = {}
    alerts: list[str] = []
    open: dict[str, int] = {}
    tiers: dict[str, TierCounts] = {}


def encode_status(report: StatusReport) -> bytes:
    """The body of `/status`."""
    return msgspec.json.encode(report)


def decode_status(body: bytes) -> StatusReport:
    """Read a `/status` body.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(body)


_DECODER = msgspec.json.Decoder(StatusReport)
