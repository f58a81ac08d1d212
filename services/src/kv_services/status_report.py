"""What every process answers on `/status`: the one shape that the services write and `kvctl status` reads.

Fields a role has no use for keep their defaults; readers skip fields they don't know.
"""

from typing import Literal

import msgspec

from kv_services.event_log import OperatorEvent


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
        writing: being written now.
        spilled, missed, failed: written; evicted before their turn; not written because the medium failed.
        absent: found damaged, short or gone when they were to be loaded.
        full: the last write found no room on the medium.
        choice: the last comparison of loading with computing, in one sentence.
    """

    blocks: int
    limit: int
    used_bytes: int
    waiting: int = 0
    writing: int = 0
    spilled: int = 0
    missed: int = 0
    failed: int = 0
    absent: int = 0
    full: bool = False
    choice: str = ""


class MoveCounts(msgspec.Struct, frozen=True):
    """How far a node is with giving its blocks away; `elsewhere + moved + left + open` is `total`.

    Attributes:
        kind: what they are given away for.
        state: `running`, `done`, or `failed` with the cause in `problem`.
        total: blocks in memory when it began, and for a drain those in slower tiers.
        elsewhere: that others hold too, or that the remote tier keeps, where others take them over.
        moved: that another node took.
        left: that stay, since nobody has room or they were gone when their turn came.
        open: not looked at yet.
        nbytes: read by others so far.
        on_media: blocks in slower tiers, which stay there and are announced again after a restart.
        left_names: sequence hashes of the first of those left, hexadecimal.
        safe_to_stop: nobody depends on this node any more: nothing runs, waits, is read or still to be moved.
    """

    kind: Literal["drain", "rebalance"]
    state: Literal["running", "done", "failed"]
    total: int = 0
    elsewhere: int = 0
    moved: int = 0
    left: int = 0
    open: int = 0
    nbytes: int = 0
    on_media: int = 0
    left_names: list[str] = []
    problem: str = ""
    safe_to_stop: bool = False


class ShardStatus(msgspec.Struct, frozen=True):
    """One piece of a sequence that is larger than a node.

    Attributes:
        request, epoch: whose it is.
        coordinator: the node that decodes it.
        layers, tokens: what the piece covers, as `start-end`, ends exclusive.
        stored: tokens whose KV is there in every layer of the piece.
        slots: that it holds until its request ends.
    """

    request: str
    epoch: int
    coordinator: str
    layers: str
    tokens: str
    stored: int
    slots: int


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
        events: what happened lately and why, oldest first.
        moving: how far it is with giving its blocks away; none when nobody asked for that.
        running: requests being worked on.
        waiting: requests that wait for slots or a turn.
        transports: the transport in use to each peer that KV moved to or from, by the peer's id.
        codecs: how KV was last written to each decode node, and why, in one sentence by its id.
        members: what it thinks of the others: `unseen`, `alive`, `suspect`, `dead` or `refused`, by their ids.
        wire: wire version and revision that this process speaks, as "1.0".
        wires: the same of the members it has heard, by their ids; they differ while a cluster is being upgraded.
        alerts: thresholds that are crossed now, one sentence each.
        shards: pieces of sequences larger than a node that it holds.
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
    moving: MoveCounts | None = None
    events: list[OperatorEvent] = []
    shards: list[ShardStatus] = []
    wire: str = ""
    wires: dict[str, str] = {}
    codecs: dict[str, str] = {}


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
