"""Figures of an agent, for those who export metrics."""

from dataclasses import dataclass, field

from kv_transport.types import TransferStats


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One introduced peer.

    Attributes:
        transports: schemes of the links that stand.
        preferred: the scheme that a new transfer would take, or why there is none.
        units_waiting, units_in_flight: posted and not yet posted.
        units_failed: units that came back, for whatever reason.
    """

    peer: str
    transports: tuple[str, ...]
    preferred: str
    units_waiting: int
    units_in_flight: int
    units_failed: int


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Since the agent was started.

    Attributes:
        sent_bytes, fetched_bytes, received_bytes: verified KV bytes by scheme: pushed by us, read by us, pushed to us.
        transfers_done, transfers_failed: that this side posted.
        retries: units that were posted again.
        checksum_failures: units whose bytes did not pass, in any direction.
        units_refused: units of peers that no grant, generation or nonce allowed.
        notifs_dropped: notifications that nobody fetched in time.
        quarantined_slots: slots that wait for a fence now.
    """

    sent_bytes: dict[str, int] = field(default_factory=dict)
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    transfers_done: int = 0
    transfers_failed: int = 0
    retries: int = 0
    checksum_failures: int = 0
    units_refused: int = 0
    notifs_dropped: int = 0
    quarantined_slots: int = 0
    peers: tuple[PeerStats, ...] = ()


@dataclass(slots=True)
class Totals:
    """What an agent sums up over the transfers that it posted."""

    sent: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    retries: int = 0
    notifs_dropped: int = 0

    def count_put(self, scheme: str, nbytes: int) -> None:
        """One transfer of one unit has ended well, without a retry."""
        self.sent[scheme] = self.sent.get(scheme, 0) + nbytes
        self.done += 1

    def count(self, stats: TransferStats, *, fetched: bool, failed: bool) -> None:
        """One transfer has ended."""
        into = self.fetched if fetched else self.sent
        for scheme, nbytes in stats.transports.items():
            into[scheme] = into.get(scheme, 0) + nbytes
        self.retries += stats.retries
        if failed:
            self.failed += 1
        else:
            self.done += 1
