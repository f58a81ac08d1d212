"""One introduced peer: its links, and the units that wait for it.

All flows to a peer share one window and one order of work (`Scheduler`). Each flow has a link of the best transport
that is allowed, reachable and not known to be broken; when a link breaks, its flows move on to the next one and
resume at the first unit that the peer has not got. The old link is at rest before the new one is asked for anything.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kv_core.errors import KVError
from kv_core.ids import RequestId
from kv_transport import limits
from kv_transport.backends.base import Backend, Link, Surroundings
from kv_transport.codec_choice import CodecPolicy, LinkMeter
from kv_transport.codecs import Codec
from kv_transport.direct import DirectDesk, DirectPost, Posting
from kv_transport.errors import (
    ChecksumMismatch,
    ConnectionLost,
    GrantBusy,
    GrantRefused,
    NoTransport,
    QuarantineFull,
    TransferTimeout,
)
from kv_transport.flow import Flow
from kv_transport.frames import FromOwner
from kv_transport.recovery import FallbackToTcp, RetryWithBackoff, TransferTask, diagnose_transfer_failure
from kv_transport.scheduler import Scheduler
from kv_transport.tickets import AgentMetadata, ReadGrant, WriteGrant
from kv_transport.types import PeerName, TransferPriority, XferOp
from kv_transport.units import NonceSource, Unit

_log = logging.getLogger(__name__)
_LOSSES_MAX: Final = 2
"""How often one transport may break under one flow before it counts as unusable."""
_BUSY_RETRIES: Final = 50
_BUSY_PAUSE_S: Final = 0.01


class Peer:
    """See the module. Implements `base.LinkOwner` and `flow.FlowHost`; lives on the loop."""

    def __init__(
        self, around: Surroundings, metadata: AgentMetadata, backends: Sequence[Backend], nonces: NonceSource
    ) -> None:
        self.metadata = metadata
        self.failed_units = 0
        self._around = around
        self._backends = {backend.scheme: backend for backend in backends}
        self._preferred = next(iter(self._backends), "")
        self._scheduler = Scheduler(around.config.window_size)
        self._links: dict[str, Link] = {}
        self._meters: dict[str, LinkMeter] = {}
        self._connecting: dict[str, asyncio.Task[Link]] = {}
        self._flows: dict[int, Flow] = {}
        self._direct: dict[DirectPost, None] = {}
        self._keys: dict[int, tuple[Flow, int]] = {}
        self._key_of: dict[tuple[int, int], int] = {}
        self._serial = 0
        self._nonces = nonces
        self._closed: KVError | None = None
        self._pumping = False

    @property
    def name(self) -> PeerName:
        return self.metadata.name

    @property
    def flows(self) -> list[Flow]:
        return list(self._flows.values())

    @property
    def postings(self) -> list[Posting]:
        """Every transfer at work."""
        return [*self._flows.values(), *self._direct]

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    @property
    def units_waiting(self) -> int:
        return len(self._scheduler)

    def unit_bytes(self, nbytes: int) -> int:
        """Most bytes of each unit of so many that are to be moved at once."""
        reached = (scheme for scheme, backend in self._backends.items() if backend.reaches(self.metadata) is None)
        return self._around.config.unit_bytes_over(next(reached, ""), nbytes)

    # Flows.

    def start_flow(
        self,
        *,
        name: str,
        kind: str,
        priority: TransferPriority,
        ticket: WriteGrant | ReadGrant | None,
        layers: range,
        total_bytes: int,
        policy: CodecPolicy,
        on_release: Callable[[Posting], None],
    ) -> Flow:
        """A new flow; its link is being looked for from now on."""
        if self._closed is not None:
            raise self._closed
        flow = Flow(
            self,
            self._around.loop,
            self._around.clock,
            name=name,
            kind=kind,
            priority=priority,
            ticket=ticket,
            layers=layers,
            total_bytes=total_bytes,
            policy=policy,
            on_release=on_release,
        )
        self._flows[id(flow)] = flow
        link = self._standing_link(ticket)
        if link is None:
            self._around.spawn(self._bring_up(flow, None))
        elif isinstance(ticket, WriteGrant):
            # Asked at once: the answer comes while the caller says what there is to send.
            answer = link.ask_open(ticket.ticket, policy.fidelity)
            self._around.spawn(self._bring_up(flow, None, (link, answer)))
        else:
            if link.encodes:
                self._around.codec_rates.begin_trial()
            flow.linked(link, None)
        return flow

    def post_direct(self, desk: DirectDesk, unit: Unit, name: str, region: int) -> DirectPost | None:
        """Post the only unit of a transfer past the queue, where the link takes it directly and nothing would be
        overtaken; None where that is not so. `region` of ours is held until it is at rest. Raises `UnknownRegion`.
        """
        link = self._links.get(self._preferred)
        if link is None or link.lost is not None or not link.takes_directly(unit):
            return None
        desk.regions.hold(region)
        if not self._scheduler.pass_through(unit.nbytes):
            # What is in flight may have been answered without a word.
            link.take_answers()
            if self._links.get(link.scheme) is not link or not self._scheduler.pass_through(unit.nbytes):
                desk.regions.let_go(region)
                return None
        post = DirectPost(self, desk, name, unit, region, link)
        self._direct[post] = None
        link.post_quietly(post)
        return post

    def post_again(self, post: DirectPost, put: int) -> bool:
        """The same with what it made, if its link still stands and there is room; its region is held."""
        link = post.first_link
        if link.lost is not None or self._closed is not None or not self._scheduler.pass_through(post.total_bytes):
            return False
        post.unit.put = put
        self._direct[post] = None
        link.post_quietly(post)
        return True

    def direct_landed(self, post: DirectPost) -> None:
        self._scheduler.passed(post.total_bytes)
        del self._direct[post]
        post.landed()
        self._pump()

    def direct_bounced(self, post: DirectPost, error: KVError) -> None:
        self._scheduler.passed(post.total_bytes)
        del self._direct[post]
        post.give_way(self._take_over(post, post.first_link, post.desk.policy(), error))
        self._pump()

    def take_answers(self) -> None:
        """Look for answers that came without a word, before somebody is told what there is."""
        for link in list(self._links.values()):
            link.take_answers()

    def _take_over(self, post: DirectPost, link: Link, policy: CodecPolicy, error: KVError) -> Flow:
        """A flow in the state in which it would be, had it posted that unit."""
        flow = Flow(
            self,
            self._around.loop,
            self._around.clock,
            name=post.name,
            kind=post.kind,
            priority=post.priority,
            ticket=None,
            layers=range(0),
            total_bytes=post.total_bytes,
            policy=policy,
            on_release=post.heir_over,
        )
        self._flows[id(flow)] = flow
        flow.adopt(post.unit)
        if self._closed is not None:
            flow.stop(self._closed)
        self._note_bounce(flow, 0, link, error)
        flow.settled(0, link.scheme, error, link_lost=link.lost is not None)
        if flow.over:
            return flow
        if link.lost is None:
            flow.linked(link, None)
        else:
            self._recover(flow, link, error)
        return flow

    def enqueue(self, flow: Flow, units: Sequence[int]) -> None:
        for unit_id in units:
            self._serial += 1
            key = self._serial
            self._keys[key] = flow, unit_id
            self._key_of[id(flow), unit_id] = key
            unit = flow.unit(unit_id)
            self._scheduler.add(key, flow.priority, unit.layer, unit.nbytes)
        self._pump()

    def dequeue(self, flow: Flow, units: Sequence[int]) -> None:
        for unit_id in units:
            key = self._key_of.pop((id(flow), unit_id))
            self._scheduler.remove(key)
            del self._keys[key]

    def flow_over(self, flow: Flow) -> None:
        """Its memory is free: tell the owner of the grant, forget it."""
        if self._flows.pop(id(flow), None) is None:
            return
        if isinstance(flow.ticket, WriteGrant) and flow.link is not None:
            flow.link.close_grant(flow.ticket.ticket, flow.error)

    def _pump(self) -> None:
        """Post what the window has room for. A unit may settle while it is being posted, hence the loop."""
        if self._pumping or not len(self._scheduler):
            return
        self._pumping = True
        try:
            while picked := self._scheduler.pick():
                for key in picked:
                    self._post(key)
        finally:
            self._pumping = False
        if self._direct and len(self._scheduler):
            # Something waits for a place in the window that a put holds which nobody may be waiting for.
            for link in list(self._links.values()):
                link.want_answers()

    def _post(self, key: int) -> None:
        flow, unit_id = self._keys.pop(key)
        del self._key_of[id(flow), unit_id]
        link = flow.link
        assert link is not None, "a flow without a link has nothing queued"
        flow.posted(unit_id)
        unit = flow.unit(unit_id)
        self._choose_codec(flow, unit, link)
        self._meter(link).posted(self._around.clock.monotonic_ns(), unit.codec)
        link.post(unit, partial(self._settled, key, flow, unit_id, link))

    def _choose_codec(self, flow: Flow, unit: Unit, link: Link) -> None:
        policy, rates, meter = flow.policy, self._around.codec_rates, self._meter(link)
        if not link.encodes or meter.rate is None:
            unit.codec = policy.pick(link.scheme, link.encodes, meter, ())
        else:
            untried = policy.lz4_ratio is None and unit.op is XferOp.WRITE and policy.allows(Codec.LZ4)
            if untried and rates.may_help(Codec.LZ4, meter.rate):
                policy.note_lz4(rates.sample_lz4(unit.sample(limits.LZ4_SAMPLE_BYTES)))
            costs = rates.costs(unit.geometry(), policy.lz4_ratio)
            unit.codec = policy.pick(link.scheme, True, meter, costs, link.moving_cost())
        unit.codec_required = unit.codec is policy.wanted

    def _meter(self, link: Link) -> LinkMeter:
        return self._meters.setdefault(link.scheme, LinkMeter())

    def _settled(self, key: int, flow: Flow, unit_id: int, link: Link, error: KVError | None) -> None:
        self._scheduler.settle(key)
        unit = flow.unit(unit_id)
        moved = unit.nbytes if error is None else 0
        self._meter(link).settled(moved, self._around.clock.monotonic_ns(), unit.codec)
        if error is not None:
            self._note_bounce(flow, unit_id, link, error)
        flow.settled(unit_id, link.scheme, error, link_lost=link.lost is not None)
        self._pump()

    # Links.

    def link_lost(self, link: Link, error: KVError) -> None:
        if self._links.get(link.scheme) is link:
            del self._links[link.scheme]
        for flow in [flow for flow in self._flows.values() if flow.link is link]:
            _log.warning(
                "transfer lost its link peer=%s transport=%s transfer=%s cause=%s",
                self.name,
                link.scheme,
                flow.name,
                error,
            )
            flow.unlinked()
            self._recover(flow, link, error)

    def _recover(self, flow: Flow, link: Link, error: KVError) -> None:
        """Look for another link for a flow whose link broke."""
        self._plan_recovery(flow, link, error)
        self._note_failure(flow, link.scheme, error, established=True)
        self._around.spawn(self._bring_up(flow, link))

    def _plan_recovery(self, flow: Flow, link: Link, error: KVError) -> None:
        task = TransferTask(RequestId(flow.name), self._around.me.node, self.name.node, link.scheme)
        match diagnose_transfer_failure(task, error):
            case FallbackToTcp(lz4) as action:
                flow.policy.fall_back(lz4=lz4)
                self._around.on_recovery(task, action, error)
            case _:
                pass  # the flow's own machine retries, or gives up and tells its caller

    def _note_bounce(self, flow: Flow, unit_id: int, link: Link, error: KVError) -> None:
        """Count a unit that came back; tell of the retry that the flow's machine is about to decide on, if it is."""
        self.failed_units += 1
        if not isinstance(error, ChecksumMismatch):
            return
        failures = flow.checksum_failures(unit_id)
        task = TransferTask(RequestId(flow.name), self._around.me.node, self.name.node, link.scheme, failures)
        action = diagnose_transfer_failure(task, error)
        if isinstance(action, RetryWithBackoff) and not flow.over:
            self._around.on_recovery(task, action, error)

    def grant_fenced(self, ticket: int) -> None:
        for flow in self.flows:
            if isinstance(flow.ticket, WriteGrant) and flow.ticket.ticket == ticket:
                flow.stop(GrantRefused(ticket=ticket, reason="its owner has revoked it"))

    def _standing_link(self, ticket: WriteGrant | ReadGrant | None) -> Link | None:
        """The link that a new transfer can use as it is: of the transport we prefer."""
        scheme = self._preferred
        link = self._links.get(scheme)
        barred = ticket is not None and bool(ticket.transports) and scheme not in ticket.transports
        return link if link is not None and link.lost is None and not barred else None

    async def connect(self) -> Link:
        """A link that stands, else a new one of the best transport; for what belongs to no flow."""
        for link in self._links.values():
            if link.lost is None:
                return link
        tried = []
        for scheme, backend in self._backends.items():
            reason = backend.reaches(self.metadata)
            if reason is None:
                try:
                    return await self._link(scheme)
                except KVError as error:
                    reason = str(error)
            tried.append(f"{scheme}: {reason}")
        raise NoTransport(peer=str(self.name), tried="; ".join(tried) or "none configured")

    async def _bring_up(
        self, flow: Flow, former: Link | None, asked: tuple[Link, asyncio.Future[FromOwner]] | None = None
    ) -> None:
        """Find a link for a flow, or tell it why there is none. `asked`: one that was asked for its grant already."""
        if former is not None:
            # No unit may be on its way by two links at once.
            await former.close()
        while asked is not None or not flow.over:
            scheme, reasons = self._candidate(flow) if asked is None else (asked[0].scheme, [])
            if scheme is None:
                flow.stop(self._no_link(flow, reasons))
                return
            link, answer = asked or (None, None)
            asked = None
            try:
                link = link or await self._link(scheme)
                if link.encodes:
                    self._around.codec_rates.begin_trial()
                verified = await self._announce(flow, link, answer)
            except (ConnectionLost, TransferTimeout, NoTransport, QuarantineFull) as error:
                self._note_failure(flow, scheme, error, established=False)
            except KVError as error:
                # The peer itself says no: another transport would not change its mind.
                flow.stop(error)
            else:
                if link.lost is not None:
                    continue
                if not flow.over:
                    flow.linked(link, verified)
                elif isinstance(flow.ticket, WriteGrant):
                    # Given up while the owner was asked, which thinks that we are at it.
                    link.close_grant(flow.ticket.ticket, flow.error)
                return

    async def _announce(
        self, flow: Flow, link: Link, answer: asyncio.Future[FromOwner] | None = None
    ) -> list[int] | None:
        if not isinstance(flow.ticket, WriteGrant):
            return None
        ticket, tries = flow.ticket.ticket, 0
        while True:
            try:
                return await link.opened(ticket, answer or link.ask_open(ticket, flow.policy.fidelity))
            except GrantBusy:
                answer, tries = None, tries + 1
                if tries > _BUSY_RETRIES:
                    raise
                await asyncio.sleep(_BUSY_PAUSE_S)

    def _candidate(self, flow: Flow) -> tuple[str | None, list[str]]:
        """The best transport for a flow, or None and what is wrong with each."""
        allowed = flow.ticket.transports if flow.ticket is not None else []
        reasons, usable = [], []
        for rank, (scheme, backend) in enumerate(self._backends.items()):
            losses = flow.failures.get(scheme, 0)
            reason = backend.reaches(self.metadata)
            if allowed and scheme not in allowed:
                reason = "the peer does not accept it"
            elif losses >= _LOSSES_MAX:
                reason = str(flow.last_failure[scheme])
            if reason is None:
                usable.append((losses, rank, scheme))
            else:
                reasons.append(f"{scheme}: {reason}")
        return (min(usable)[2], reasons) if usable else (None, reasons)

    def _no_link(self, flow: Flow, reasons: list[str]) -> KVError:
        """The error of a flow without a link: what happened last if something did, else why nothing could."""
        if flow.last_failure:
            return next(reversed(flow.last_failure.values()))
        return NoTransport(peer=str(self.name), tried="; ".join(reasons) or "none configured")

    def _note_failure(self, flow: Flow, scheme: str, error: KVError, *, established: bool) -> None:
        flow.last_failure.pop(scheme, None)
        flow.last_failure[scheme] = error
        # What could not even be made is not tried again; what broke under way gets another chance after the others.
        flow.failures[scheme] = flow.failures.get(scheme, 0) + (1 if established else _LOSSES_MAX)
        if scheme == "shm" and isinstance(error, TransferTimeout):
            # The process is on this host and does not run: no other way leads to it.
            flow.failures.update(dict.fromkeys(self._backends, _LOSSES_MAX))
            for other in self._backends:
                flow.last_failure.setdefault(other, error)

    async def _link(self, scheme: str) -> Link:
        """The link of that transport, made once however many ask."""
        if self._closed is not None:
            raise self._closed
        link = self._links.get(scheme)
        if link is not None:
            return link
        task = self._connecting.get(scheme)
        if task is None:
            task = self._around.loop.create_task(self._make_link(scheme))
            self._connecting[scheme] = task
            task.add_done_callback(partial(self._connected, scheme))
        return await asyncio.shield(task)

    async def _make_link(self, scheme: str) -> Link:
        link = await self._backends[scheme].connect(self.metadata, self._nonces, self)
        if self._closed is not None:
            await link.close()
            raise self._closed
        if link.lost is not None:
            raise link.lost
        self._links[scheme] = link
        return link

    def _connected(self, scheme: str, task: asyncio.Task[Link]) -> None:
        self._connecting.pop(scheme, None)
        if not task.cancelled():
            task.exception()  # told to those who wait; nobody may

    async def close(self, error: KVError | None = None) -> None:
        """Fail what is running, end the links, wait until no memory is in use. Idempotent."""
        cause = error or ConnectionLost(peer=str(self.name), transport="any", cause="the peer was removed")
        self._closed = self._closed or cause
        for flow in self.flows:
            flow.stop(cause)
        for task in self._connecting.values():
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        for link in list(self._links.values()):
            await link.close()
        for flow in self.flows:
            await flow.released()
