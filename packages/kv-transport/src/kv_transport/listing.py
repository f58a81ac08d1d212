"""Lists what an agent holds: everything alive, with its owner."""

from collections.abc import Collection, Iterable

from kv_transport.backends.base import Backend
from kv_transport.leases import LeaseKeeper
from kv_transport.ledger import Ledger
from kv_transport.peers import Peer
from kv_transport.regions import Inventory, InventoryItem, RegionTable
from kv_transport.stats import PeerStats


def inventory_of(
    regions: RegionTable, ledger: Ledger, leases: LeaseKeeper, peers: Collection[Peer], backends: Iterable[Backend]
) -> Inventory:
    """Every region, transport, peer, link, session, grant, lease, quarantine and transfer."""
    for peer in peers:
        peer.take_answers()
    items = [
        InventoryItem(
            kind="region",
            ident=str(region.region),
            owner=region.memory.name,
            state=region.access.value,
            detail=f"{region.nbytes} bytes, {regions.uses(region.region)} uses",
        )
        for region in regions.all()
    ]
    for peer in peers:
        items += _of_peer(peer)
    for backend in backends:
        address = "reachable" if backend.address() is not None else "not reachable by peers"
        items.append(
            InventoryItem(kind="transport", ident=backend.scheme, owner="agent", state=backend.state(), detail=address)
        )
        items += [
            InventoryItem(kind="session", ident=backend.scheme, owner=str(name), state=state)
            for name, state in backend.sessions()
        ]
    return Inventory(tuple(items + _of_ledger(ledger, leases)))


def _of_peer(peer: Peer) -> list[InventoryItem]:
    owner = str(peer.name)
    items = [
        InventoryItem(
            kind="peer", ident=owner, owner=owner, state="introduced", detail=f"{peer.units_waiting} units waiting"
        )
    ]
    items += [
        InventoryItem(
            kind="link",
            ident=link.scheme,
            owner=owner,
            state="open" if link.lost is None else "lost",
            detail=f"{link.units_posted} units in flight",
        )
        for link in peer.links
    ]
    items += [
        InventoryItem(
            kind="transfer",
            ident=posting.name,
            owner=owner,
            state=posting.state.value,
            detail=f"{posting.kind} over {posting.link.scheme if posting.link is not None else 'no link yet'}, "
            f"{posting.stats().nbytes} of {posting.total_bytes} bytes",
        )
        for posting in peer.postings
    ]
    return items


def _of_ledger(ledger: Ledger, leases: LeaseKeeper) -> list[InventoryItem]:
    items = []
    for entry in ledger.grants():
        kind = "quarantine" if ledger.is_quarantined(entry.grant.ticket) else "grant"
        items.append(
            InventoryItem(
                kind=kind,
                ident=str(entry.grant.ticket),
                owner=entry.grant.request_id,
                state="revoked" if entry.revoked else "open",
                detail=f"{entry.grant.num_positions} slots, writer {entry.writer or 'none yet'}",
            )
        )
    items += [
        InventoryItem(
            kind="lease",
            ident=str(lease.grant.ticket),
            owner=lease.grant.request_id,
            state="live",
            detail=f"{lease.grant.num_positions} slots, {leases.left_ms(lease.grant.ticket)} ms left",
        )
        for lease in ledger.reads.all()
    ]
    return items


def peer_stats(peer: Peer, backends: Iterable[Backend]) -> PeerStats:
    """The figures of one peer."""
    peer.take_answers()
    reasons = []
    preferred = ""
    for backend in backends:
        reason = backend.reaches(peer.metadata)
        if reason is None:
            preferred = backend.scheme
            break
        reasons.append(f"{backend.scheme}: {reason}")
    return PeerStats(
        peer=str(peer.name),
        transports=tuple(link.scheme for link in peer.links),
        preferred=preferred or "; ".join(reasons),
        units_waiting=peer.units_waiting,
        units_in_flight=sum(link.units_posted for link in peer.links),
        units_failed=peer.failed_units,
    )
