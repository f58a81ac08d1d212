"""`KVCacheTransferEngine`: moves the KV of requests between arenas, layer by layer, shallow layers first.

Whatever moves KV from one process to another uses it: hand-over from prefill to decode, nodes joining or leaving, and
reading a shared prefix, be it in the holder's memory or in a slower tier that it is brought up from first. A node's own
tiers are files and objects: blocks go down and up between those and their slots without it. Two directions: a receiver
grants writes into slots it reserved (`grant_writes`, `expect`) and a sender fills them (`open_handover`,
`transfer_for_decode`); or a holder leases reads (`lease_reads`) and a reader fetches (`fetch`).
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from kv_core.block import BlockRef, KVCacheBlock, MemoryAddress, RegionOffset
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import EXACT, Fidelity
from kv_transport.agent import TransferAgent
from kv_transport.arena import Arena
from kv_transport.codec_choice import CodecPolicy
from kv_transport.codecs import Codec
from kv_transport.errors import (
    AgentClosed,
    CodecFailed,
    GeometryMismatch,
    GrantRefused,
    InvalidDescriptor,
    StaleIncarnation,
)
from kv_transport.flow import Flow
from kv_transport.futures import TransferFuture
from kv_transport.handover import Handover, check_forms, local_arena, require_fit, ticket_units
from kv_transport.inbound import Inbound
from kv_transport.ledger import new_ticket
from kv_transport.peers import Peer
from kv_transport.reshard_fetch import Assembly, HeadSplit, ReshardFuture, head_sources, slice_units
from kv_transport.tickets import KVForm, ReadGrant, WriteGrant
from kv_transport.types import TransferPriority, XferOp

LOSSLESS: Final = (Codec.LZ4,)
"""Codecs that are accepted unless told otherwise: what comes back is the same bytes."""


class KVCacheTransferEngine:
    """See the module. Lives on the event loop of its agent, which must be started."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent: Final = agent
        self._inbounds: dict[int, Inbound] = {}
        self._grants: dict[tuple[NodeId, RequestId], WriteGrant] = {}
        self._closed = False

    # The receiver's side of a hand-over.

    def grant_writes(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockRef],
        *,
        seq_start: int,
        seq_end: int,
        layers: tuple[int, int] | None = None,
        writer: NodeId | None = None,
        accept: Sequence[Codec] = LOSSLESS,
    ) -> WriteGrant:
        """Let a peer write these blocks (all of one registered arena, generations already raised).

        They hold tokens `[seq_start, seq_end)`, `block_size` each. The slots belong to the grant from now on: they
        are free again when `Inbound.released()` returns.

        Args:
            accept: codecs that the sender may use besides raw bytes. With a lossy one `Inbound.fidelity` says what the
                blocks may be published as.

        Raises:
            InvalidDescriptor, StaleGeneration: the blocks or numbers cannot be.
            TransferTooLarge: too many grants are open.
        """
        self._require_open()
        arena = local_arena(self.agent.regions, blocks)
        first, last = layers or (0, arena.geometry.num_layers)
        grant = WriteGrant(
            ticket=new_ticket(),
            node=self.agent.name.node,
            incarnation=self.agent.name.incarnation,
            request_id=request_id,
            region=int(blocks[0].region),
            slots=[ref.slot for ref in blocks],
            generations=[int(ref.generation) for ref in blocks],
            layer_start=first,
            layer_end=last,
            seq_start=seq_start,
            seq_end=seq_end,
            form=KVForm.of(arena.geometry, arena.layout, arena.fp8_scale),
            num_slots=arena.num_slots,
            transports=self._offered(writer, len(blocks)),
            writer=writer or "",
            codecs=[codec.value for codec in accept if codec is not Codec.NONE],
        )
        entry = self.agent.ledger.issue(grant, arena)
        agent = self.agent
        inbound = Inbound(entry, agent.ledger, agent.loop, agent.clock, agent.config)
        self._inbounds[grant.ticket] = inbound
        inbound.when_released(partial(self._forget_if_taken, inbound))
        return grant

    def expect(self, request_id: RequestId, grant: WriteGrant, *, timeout_ms: int | None = None) -> Inbound:
        """Watch a grant being filled; call it for every grant. `timeout_ms` bounds the whole hand-over, from now.

        Raises:
            GrantRefused: it is not one of ours for that request, or it is over.
        """
        inbound = self._inbounds.get(grant.ticket)
        if inbound is None or grant.request_id != request_id:
            raise GrantRefused(ticket=grant.ticket, reason=f"it is not an open grant for {request_id}")
        inbound.taken = True
        if timeout_ms is not None:
            inbound.expire_after(timeout_ms)
        if inbound.slots_free:
            self._forget_if_taken(inbound)
        return inbound

    # The sender's side of a hand-over.

    def open_handover(
        self,
        request_id: RequestId,
        grant: WriteGrant,
        priority: TransferPriority = TransferPriority.HIGH,
        *,
        codec: Codec | None = None,
        fidelity: Fidelity = EXACT,
    ) -> Handover:
        """Start sending under a grant; connects and announces itself at once. Feed it with `Handover.submit`.

        Args:
            codec: take this one wherever the transport in use encodes; None leaves it to configuration and figures.
            fidelity: of the blocks; what is not exact is never made lossy again.

        Raises:
            GeometryMismatch: none of our arenas holds such blocks, or the receiver does not accept the codec.
            CodecFailed: a codec is asked for, and no transport that we have encodes.
            UnknownPeer, StaleIncarnation: the receiver was not introduced, or has restarted since.
            GrantRefused: the grant is for another request.
        """
        self._require_open()
        if grant.request_id != request_id:
            raise GrantRefused(ticket=grant.ticket, reason=f"it is for {grant.request_id}, not {request_id}")
        agent = self.agent
        cast = require_fit(agent.regions, grant)
        policy = self._policy(grant.codecs, codec, Codec.FP8_CAST.fidelity if cast else fidelity)
        held: set[int] = set()
        peer = self._peer_of(grant)
        flow = agent.start_flow(
            peer,
            name=request_id,
            kind="handover",
            priority=priority,
            ticket=grant,
            layers=range(grant.layer_start, grant.layer_end),
            total_bytes=grant.total_bytes,
            regions=held,
            policy=policy,
        )
        return Handover(flow, grant, agent.regions, held, agent.poster, peer.unit_bytes, cast=cast)

    def add_grant(self, grant: WriteGrant) -> None:
        """Keep a grant for `transfer_for_decode`, which names only request and node."""
        self._grants[grant.name.node, RequestId(grant.request_id)] = grant

    def transfer_for_decode(
        self,
        request_id: RequestId,
        kv_blocks: Sequence[KVCacheBlock],
        remote_node_id: NodeId,
        priority: TransferPriority = TransferPriority.HIGH,
        *,
        codec: Codec | None = None,
        fidelity: Fidelity = EXACT,
    ) -> TransferFuture:
        """Send complete blocks to the decode node under the grant given to `add_grant`.

        Raises:
            GrantRefused: there is no grant of that node for that request.
            InvalidDescriptor: the blocks are not the ones that the grant is for.
        """
        grant = self._grants.pop((remote_node_id, request_id), None)
        if grant is None:
            raise GrantRefused(ticket=0, reason=f"no grant of {remote_node_id} for {request_id} was added")
        pieces = self._pieces(kv_blocks, grant)
        handover = self.open_handover(request_id, grant, priority, codec=codec, fidelity=fidelity)
        for layer in sorted(pieces):
            refs = pieces[layer]
            for start, end in _runs(sorted(refs)):
                handover.submit(layer, [refs[position] for position in range(start, end)], start)
        return handover.sealed_future()

    # One-sided reads.

    def lease_reads(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockRef],
        *,
        seq_start: int,
        seq_end: int,
        lease_ms: int,
        layers: tuple[int, int] | None = None,
        fidelity: Fidelity = EXACT,
    ) -> ReadGrant:
        """Let a peer read these sealed blocks for `lease_ms`. Pin them for at least as long.

        `fidelity` is that of the blocks; what is not exact is never made lossy again.

        Raises:
            InvalidDescriptor, StaleGeneration: the blocks or numbers cannot be, or a block is not sealed.
            TransferTooLarge: too many leases are alive.
        """
        self._require_open()
        arena = local_arena(self.agent.regions, blocks)
        first, last = layers or (0, arena.geometry.num_layers)

        def draft(lease_index: int) -> ReadGrant:
            return ReadGrant(
                ticket=new_ticket(),
                node=self.agent.name.node,
                incarnation=self.agent.name.incarnation,
                request_id=request_id,
                region=int(blocks[0].region),
                slots=[ref.slot for ref in blocks],
                generations=[int(ref.generation) for ref in blocks],
                layer_start=first,
                layer_end=last,
                seq_start=seq_start,
                seq_end=seq_end,
                form=KVForm.of(arena.geometry, arena.layout, arena.fp8_scale),
                num_slots=arena.num_slots,
                lease_index=lease_index,
                lease_ms=lease_ms,
                codecs=_writable(arena, fidelity),
                fidelity=str(fidelity),
            )

        return self.agent.leases.grant(arena, draft)

    def renew_lease(self, ticket: int, lease_ms: int) -> None:
        """Let the lease live `lease_ms` from now. Raises `LeaseEnded` when it is over already."""
        self.agent.leases.renew(ticket, lease_ms)

    def release_lease(self, ticket: int) -> None:
        """End a lease; reads that are not over fail with `LeaseEnded`. Idempotent."""
        self.agent.leases.release(ticket)

    def fetch(
        self,
        read_grant: ReadGrant,
        into: Sequence[BlockRef],
        priority: TransferPriority = TransferPriority.HIGH,
        *,
        layers: tuple[int, int] | None = None,
        accept: Sequence[Codec] = LOSSLESS,
        codec: Codec | None = None,
    ) -> TransferFuture:
        """Read leased blocks into our own (one per position, generations already raised); shallow layers first.

        Verified cells carry their checksums in our arena, so the blocks can be leased or handed over again.

        Args:
            accept: codecs that may be used besides raw bytes; `TransferFuture.fidelity` says what it came to.
            codec: take this one wherever the transport in use encodes; None leaves it to configuration and figures.

        Raises:
            InvalidDescriptor, StaleGeneration, GeometryMismatch: these blocks cannot take it.
            CodecFailed: a codec is asked for, and no transport that we have encodes.
            UnknownPeer, StaleIncarnation: the holder was not introduced, or has restarted since.
        """
        self._require_open()
        arena = local_arena(self.agent.regions, into)
        form = KVForm.of(arena.geometry, arena.layout, arena.fp8_scale)
        policy = self._read_policy(read_grant, form, accept, codec)
        if len(into) != read_grant.num_positions:
            raise InvalidDescriptor(
                what="blocks", value=len(into), reason=f"the lease has {read_grant.num_positions} positions"
            )
        first, last = layers or (read_grant.layer_start, read_grant.layer_end)
        if not read_grant.layer_start <= first < last <= read_grant.layer_end:
            raise InvalidDescriptor(what="layers", value=[first, last], reason="they lie outside the lease")
        peer = self._peer_of(read_grant)
        flow = self._start_fetch(peer, read_grant, range(first, last), into, priority, policy)
        for layer in range(first, last):
            flow.add(ticket_units(XferOp.READ, priority, read_grant, arena, into, layer, 0, peer.unit_bytes))
        flow.seal()
        return TransferFuture(flow)

    def fetch_heads(
        self,
        read_grants: Sequence[ReadGrant],
        into: Sequence[BlockRef],
        split: HeadSplit,
        priority: TransferPriority = TransferPriority.HIGH,
        *,
        accept: Sequence[Codec] = LOSSLESS,
        codec: Codec | None = None,
    ) -> ReshardFuture:
        """Read our heads from ranks of another tensor-parallel size, each of which has leased its part of the blocks.

        Args:
            read_grants: of every rank of the other side, in order of rank, over the same tokens and layers.
            into: our blocks, one per position, generations already raised; as `fetch`.
            split: which heads are ours.
            accept, codec: as `fetch`.

        Raises:
            InvalidDescriptor, StaleGeneration, GeometryMismatch: these blocks or leases do not fit together.
            UnknownPeer, StaleIncarnation: a holder was not introduced, or has restarted since.
        """
        self._require_open()
        arena = local_arena(self.agent.regions, into)
        sources = head_sources(arena, read_grants, len(into), split)
        values = [one for one in accept if one is not Codec.FP8_CAST]
        policies = [
            self._read_policy(grant, KVForm.of(form, arena.layout, arena.fp8_scale), values, codec)
            for _, grant, form, _ in sources
        ]
        peers = [self._peer_of(grant) for _, grant, _, _ in sources]
        assembly, future = Assembly(len(sources)), ReshardFuture()
        try:
            for (rank, grant, _, runs), policy, peer in zip(sources, policies, peers, strict=True):
                flow = self._start_fetch(peer, grant, range(grant.layer_start, grant.layer_end), into, priority, policy)
                future.add(flow)
                for layer in range(grant.layer_start, grant.layer_end):
                    units = slice_units(priority, grant, arena, into, layer, peer.unit_bytes(0))
                    for unit in units:
                        unit.source, unit.table, unit.assembly = rank, runs, assembly
                    flow.add(units)
                flow.seal()
        except KVError:
            future.cancel()
            raise
        return future

    async def close(self) -> None:
        """Cancel every hand-over that is awaited here; idempotent. The agent stays open.

        Returns when the slots are free or in quarantine: a stopped peer does not hold it up.
        """
        self._closed = True
        inbounds = list(self._inbounds.values())
        for inbound in inbounds:
            inbound.taken = True
            inbound.cancel()
        await asyncio.gather(*(inbound.settled() for inbound in inbounds))

    # Inside.

    def _start_fetch(
        self,
        peer: Peer,
        grant: ReadGrant,
        layers: range,
        into: Sequence[BlockRef],
        priority: TransferPriority,
        policy: CodecPolicy,
    ) -> Flow:
        return self.agent.start_flow(
            peer,
            name=grant.request_id,
            kind="fetch",
            priority=priority,
            ticket=grant,
            layers=layers,
            total_bytes=len(layers) * len(into) * grant.form.geometry().slot_layer_nbytes,
            regions={int(into[0].region)},
            policy=policy,
        )

    def _read_policy(self, grant: ReadGrant, form: KVForm, accept: Sequence[Codec], codec: Codec | None) -> CodecPolicy:
        """For a read into blocks of `form`. Raises `GeometryMismatch`: nothing is defined between the two sides."""
        accepted = [one.value for one in accept]
        cast = check_forms(form, grant.form, accepted)
        fidelity = Fidelity.parse(grant.fidelity)
        if not fidelity.is_exact and fidelity.codec not in accepted:
            raise GeometryMismatch(field="fidelity", ours=", ".join(["exact", *accepted]), theirs=grant.fidelity)
        both = [name for name in grant.codecs if name in accepted]
        return self._policy(both, codec, Codec.FP8_CAST.fidelity if cast else fidelity)

    def _policy(self, accepted: Sequence[str], codec: Codec | None, fidelity: Fidelity) -> CodecPolicy:
        """Raises `GeometryMismatch` when the codec asked for is not accepted, `CodecFailed` when nothing writes it."""
        if codec not in (None, Codec.NONE) and not self.agent.config.encodes:
            reason = f"transport {self.agent.config.transport} moves bytes as they are"
            raise CodecFailed(codec=codec.value, reason=reason)
        codecs = [one for one in Codec if one.value in accepted]
        wanted = codec if codec is not None else self.agent.wanted_codec(codecs)
        policy = CodecPolicy(
            codecs, wanted if wanted is None or fidelity.is_exact or wanted.lossless else None, fidelity
        )
        if codec is not None and not policy.allows(codec):
            theirs = ", ".join(["none", *accepted]) if fidelity.is_exact else f"{fidelity} already"
            raise GeometryMismatch(field="codec", ours=codec.value, theirs=theirs)
        return policy

    def _forget_if_taken(self, inbound: Inbound) -> None:
        if inbound.taken:
            self._inbounds.pop(inbound.entry.grant.ticket, None)

    def _require_open(self) -> None:
        if self._closed:
            raise AgentClosed(node=self.agent.name.node)
        self.agent.require_running()

    def _peer_of(self, ticket: WriteGrant | ReadGrant) -> Peer:
        peer = self.agent.peer(ticket.name.node)
        if peer.name.incarnation != ticket.incarnation:
            raise StaleIncarnation(peer=ticket.node, found=peer.name.incarnation, expected=ticket.incarnation)
        return peer

    def _offered(self, writer: NodeId | None, slots: int) -> list[str]:
        """Transports a writer may use: with too many slots in quarantine, none that it could write past us with."""
        held = self.agent.ledger.quarantined_slots(writer)
        return ["tcp"] if held and held + slots > self.agent.config.quarantine_slots_max else []

    def _pieces(self, kv_blocks: Sequence[KVCacheBlock], grant: WriteGrant) -> dict[int, dict[int, BlockRef]]:
        """Layer -> position -> our block, of what the caller described by tokens and bytes."""
        pieces: dict[int, dict[int, BlockRef]] = {}
        block_size = grant.form.block_size
        for block in kv_blocks:
            region, arena, offset = self._locate(block)
            slot, layer = arena.shape.locate(offset)
            position, rest = divmod(block.token_start - grant.seq_start, block_size)
            tokens_fit = not rest and block.token_end <= min(
                grant.seq_end, grant.seq_start + (position + 1) * block_size
            )
            if not tokens_fit or not 0 <= position < grant.num_positions:
                raise InvalidDescriptor(
                    what="tokens", value=[block.token_start, block.token_end], reason="not a block of the grant"
                )
            if layer != block.layer_start or (block.num_layers > 1 and not arena.layers_adjoin):
                raise InvalidDescriptor(
                    what="layers", value=[block.layer_start, block.layer_end], reason=f"layer {layer} lies there"
                )
            ref = arena.ref(region, slot)
            for index in range(block.layer_start, block.layer_end):
                pieces.setdefault(index, {})[position] = ref
        return pieces

    def _locate(self, block: KVCacheBlock) -> tuple[RegionId, Arena, int]:
        match block.location:
            case RegionOffset(region, offset):
                return region, self.agent.regions.arena(region), offset
            case MemoryAddress(address):
                for found in self.agent.regions.all():
                    if isinstance(found.memory, Arena):
                        offset = address - found.memory.data.ctypes.data
                        if 0 <= offset < found.nbytes:
                            return found.region, found.memory, offset
        raise InvalidDescriptor(what="address", value=str(block.location), reason="it is in no registered arena")


def _writable(arena: Arena, fidelity: Fidelity) -> list[str]:
    """What its blocks can be written with."""
    lossy = [Codec.FP8_E4M3, Codec.INT8] if arena.geometry.dtype is DType.BF16 and fidelity.is_exact else []
    return [codec.value for codec in (Codec.LZ4, *lossy)]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive positions as `[start, end)`."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return runs
