"""The prefill role: performs what `PrefillMachine` decides, on the bus, the transfers and the compute thread."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Final

from kv_bus.actor import Actor
from kv_bus.errors import UnexpectedReply
from kv_bus.interface import DEFERRED, Reply, Request
from kv_core.block import BlockRef
from kv_core.errors import KVError, LocalProtocolError
from kv_core.hashing import token_view
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Fidelity
from kv_core.wire import Message
from kv_prefix.pool_types import CopyBlock
from kv_services.engine.interface import Model
from kv_services.messages import HandoverAccepted, HandoverDone, PrefillDone, RunPrefill
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.announcer import Announcer
from kv_services.node.compute import BlockCopy, outcome_is_seen, run_prefill
from kv_services.node.context import NodeContext
from kv_services.node.prefill_events import (
    AbortHandover,
    AwaitedEnded,
    CancelCompute,
    FinishHandover,
    HandoverEnded,
    HandoverStats,
    NoteWaited,
    NoteWaiting,
    OpenHandover,
    PrefillAsked,
    PrefillComputed,
    PrefillEffect,
    PrefillEndAsked,
    PrefillEvent,
    PrepareBlocks,
    Pulled,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
)
from kv_services.node.prefill_state import PrefillMachine
from kv_services.node.prefix_reader import read_prefix
from kv_services.node.pull_cost import PullCost
from kv_services.node.retaining import retain_prompt
from kv_services.node.sending import Sending, SendingSink
from kv_services.replica.service import origin_epoch
from kv_transport import Handover, TransferPriority, TransferStats, WriteGrant
from kv_transport.limits import PEERS_MAX

CATCH_UP_NS: Final = 500_000_000
"""How long to wait for the claims of a computation that is over; the next digest brings lost ones within that time."""

_log = logging.getLogger(__name__)
_Key = tuple[RequestId, int]


class PrefillActor(Actor[PrefillEvent, PrefillEffect]):
    """Runs the prefill machine of one node."""

    def __init__(self, ctx: NodeContext, model: Model, machine: PrefillMachine, cost: PullCost) -> None:
        super().__init__("prefill", machine, clock=ctx.clock)
        self.machine = machine
        self._ctx = ctx
        self._model = model
        self._cost = cost
        self._asked: dict[_Key, Request[RunPrefill]] = {}
        self._sending: dict[_Key, Sending] = {}
        self._stops: dict[_Key, threading.Event] = {}
        self.announcer = Announcer(ctx, "prefill")
        self._codecs: dict[str, str] = {}

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(RunPrefill, self._on_run)

    async def close(self) -> None:
        self._ctx.telling.close()
        for stop in self._stops.values():
            stop.set()
        await super().close()

    async def _on_run(self, request: Request[RunPrefill]) -> Reply:
        message = request.message
        key = (RequestId(message.request_id), message.epoch)
        # Before its turn: what must come up does so while others are computed.
        namespace = await self._ctx.take_in(request)
        if key in self._asked:
            raise LocalProtocolError(detail=f"{message.request_id} epoch {message.epoch} was asked for twice")
        now_ns = self._ctx.clock.monotonic_ns()
        event = PrefillAsked(
            now_ns=now_ns,
            request_id=key[0],
            epoch=message.epoch,
            gateway=request.sender,
            namespace=namespace,
            tokens=token_view(message.tokens),
            decode_node=NodeId(message.decode_node),
            first_block=message.first_block,
            deadline_ns=now_ns + message.deadline_ns,
        )
        self.post(event)
        self._asked[key] = request
        request.on_abandoned(lambda: self._abandoned(key))
        return DEFERRED

    def _abandoned(self, key: _Key) -> None:
        if key in self._asked:
            self.complete(PrefillEndAsked(*key, cause="its gateway stopped waiting"))

    def computation_over(self, owner: str, after: bytes) -> None:
        """Another node's computation is over: whoever waits for it goes on when its claims are known here."""
        if not self.machine.awaits(owner):
            return
        if after:
            self.start_job(("awaited", owner), self._catch_up(owner, after), _as_event)
        else:
            self.complete(AwaitedEnded(owner))

    async def _catch_up(self, owner: str, after: bytes) -> PrefillEvent:
        try:
            await self._ctx.replica.caught_up(after, self._ctx.clock.monotonic_ns() + CATCH_UP_NS)
        except KVError as error:
            _log.info("claims of a computation not seen owner=%s cause=%s", owner, error)
        return AwaitedEnded(owner)

    def turn_over(self) -> None:
        """What others wait for leaves; what the pool did is told when it holds nobody up."""
        self._ctx.bus.flush()
        self._ctx.tell_pool_events()

    def perform(self, effect: PrefillEffect) -> None:
        key: _Key
        match effect:
            case PrepareBlocks(refs):
                self._ctx.prepare(refs)
            case AnnounceBlocks():
                self.announcer.announce(effect)
            case WithdrawBlocks():
                self.announcer.withdraw(effect)
            case NoteWaiting(request_id, epoch, wait):
                _log.info(
                    "request waits for what another computes request=%s owner=%s blocks=%d saves_ms=%.1f",
                    request_id,
                    wait.owner,
                    wait.num_blocks,
                    wait.saved_ns / 1e6,
                )
            case NoteWaited(request_id, epoch, outcome):
                _log.info("request waited request=%s outcome=%s", request_id, outcome.value)
                self._ctx.metrics.prefix_waits.labels(outcome.value).inc()
            case StartPull(request_id, epoch):
                self.start_job(("pull", request_id, epoch), self._pull(effect), _as_event)
            case OpenHandover(request_id, epoch):
                self._open(effect)
            case StartPrefill(request_id, epoch):
                self._compute(effect)
            case CancelCompute(request_id, epoch):
                stop = self._stops.get((request_id, epoch))
                if stop is not None:
                    stop.set()
            case FinishHandover(request_id, epoch):
                sending = self._sending.get((request_id, epoch))
                if sending is not None and not sending.finish.done():
                    sending.finish.set_result(None)
            case AbortHandover(request_id, epoch, error):
                key = (request_id, epoch)
                sending = self._sending.get(key)
                if sending is not None:
                    sending.aborted = error
                    self.cancel_wait(sending)
            case ReplyDone():
                # A gateway that hears that it is over counts on claims from then on, no more on what it assigned.
                self._ctx.flush_pool_events()
                self._ctx.replica.say()
                self._done(effect)
            case ReplyFailed(request_id, epoch, error):
                asked = self._asked.pop((request_id, epoch), None)
                if asked is not None:
                    asked.fail(error)

    def cancel_wait(self, sending: Sending) -> None:
        """Wake the hand-over's job, which sees that it was aborted."""
        if not sending.finish.done():
            sending.finish.set_result(None)

    def _open(self, effect: OpenHandover) -> None:
        key = (effect.request_id, effect.epoch)
        job = self.machine.job(*key)
        assert job is not None, effect
        asked = self._asked[key]
        owner = origin_epoch(asked.sender, asked.incarnation, effect.epoch)
        sending = self._sending[key] = Sending(effect, job.deadline_ns, owner)
        grant = WriteGrant.from_bytes(asked.message.grant)
        self.start_job(("handover", *key), self._hand_over(key, effect, grant, sending), _as_event)

    async def _hand_over(self, key: _Key, effect: OpenHandover, grant: WriteGrant, sending: Sending) -> PrefillEvent:
        """One hand-over from its opening to the decode node's word that the entry is right."""
        handover: Handover | None = None
        result: HandoverStats | KVError
        opened_ns = self._ctx.clock.monotonic_ns()
        try:
            await self._ctx.introductions.ensure(effect.decode_node, sending.deadline_ns)
            fidelity = self._fidelity_of(key, effect)
            handover = self._ctx.transfers.open_handover(key[0], grant, TransferPriority.HIGH, fidelity=fidelity)
            sending.begin(handover, self._ctx.num_layers)
            sending.handover = handover
            await sending.finish
            if sending.aborted is not None:
                raise sending.aborted
            stats = await self._finish(key, sending, handover)
            self._note_codec(effect.decode_node, handover, stats)
            tail_ns = self._ctx.clock.monotonic_ns() - (sending.computed_ns or opened_ns)
            result = HandoverStats(
                stats.nbytes, stats.units, stats.retries, stats.transport, stats.duration_ns, tail_ns
            )
        except KVError as error:
            result = error
        finally:
            if sending.word is not None:
                sending.word.cancel()
        if handover is not None and isinstance(result, KVError):
            await handover.cancel()
        del self._sending[key]
        now_ns = self._ctx.clock.monotonic_ns()
        metrics = self._ctx.metrics
        if isinstance(result, HandoverStats):
            metrics.transfer_done(now_ns, result.transport, result.nbytes, result.duration_ns, result.retries)
            self._ctx.recovery.ended(effect.decode_node, key[0], None, reading=False)
        elif sending.aborted is None:
            metrics.transfer_failed(type(result).__name__)
            self._ctx.recovery.ended(effect.decode_node, key[0], result, reading=False)
            stop = self._stops.get(key)
            if stop is not None:
                # Computing on would be for nobody.
                stop.set()
        return HandoverEnded(*key, result=result)

    async def _finish(self, key: _Key, sending: Sending, handover: Handover) -> TransferStats:
        """Have the last bytes verified, and the checksum over all of them compared."""
        left_ms = max(1, (sending.deadline_ns - self._ctx.clock.monotonic_ns()) // 1_000_000)
        self._speak(key)
        stats = await handover.finish(left_ms)
        # Of a lossy codec, what the decode node must have is known only now.
        await (sending.word or self._tell(key, sending, handover))
        return stats

    def _speak(self, key: _Key) -> None:
        """Tell the decode node the checksum of a hand-over, once, when its blocks are in the pool: after this word the
        request may end at any time. It travels beside the last bytes, and is compared when both are there. If the bytes
        fail, it fails."""
        sending = self._sending.get(key)
        if sending is None or sending.word is not None or sending.aborted is not None:
            return
        handover, slots = sending.handover, [ref.slot for ref in sending.refs[sending.first_block :]]
        if handover is not None and not handover.may_be_lossy and self._ctx.arena.checks[:, slots].all():
            sending.word = self._tell(key, sending, handover)

    def codec_choices(self) -> dict[str, str]:
        """How KV was last written to each decode node, and why."""
        return dict(self._codecs)

    def _note_codec(self, decode_node: NodeId, handover: Handover, stats: TransferStats) -> None:
        why = handover.explain()
        before, self._codecs[decode_node] = self._codecs.pop(decode_node, ""), why
        if len(self._codecs) > PEERS_MAX:
            del self._codecs[next(iter(self._codecs))]
        if before.split(maxsplit=1)[:1] != why.split(maxsplit=1)[:1]:
            _log.info("KV is written otherwise decode=%s units=%s why=%s", decode_node, stats.codecs, why)

    def _fidelity_of(self, key: _Key, effect: OpenHandover) -> Fidelity:
        """Of what is handed over: exact unless some of it was here before and is not known to be."""
        job, size = self.machine.job(*key), self._ctx.block_size
        assert job is not None, key
        before = [ref.slot for ref in effect.refs[effect.first_block : effect.ready_blocks]]
        if job.start < job.num_needed:
            before += _begun(job.start, size, effect.refs, job.copy)
        return self._ctx.exact.fidelity(job.namespace.fidelity, before)

    def _tell(self, key: _Key, sending: Sending, handover: Handover) -> asyncio.Future[None]:
        """Have the decode node compare the checksum over all block CRCs with ours (C4); the future of its answer."""
        word: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        word.add_done_callback(outcome_is_seen)

        def answered(outcome: Message | KVError) -> None:
            if word.done():
                return
            if isinstance(outcome, HandoverAccepted):
                word.set_result(None)
            elif isinstance(outcome, KVError):
                word.set_exception(outcome)
            else:
                names = {"actual": type(outcome).__name__, "expected": HandoverAccepted.__name__}
                word.set_exception(UnexpectedReply(node=sending.decode_node, message=HandoverDone.__name__, **names))

        job = self.machine.job(*key)
        assert job is not None, key
        slots = [ref.slot for ref in sending.refs]
        replica = self._ctx.replica
        try:
            checksum = self._ctx.entry_checksum(slots[sending.first_block :], handover.lossy_checks)
            entry = self._ctx.entry_checksum(slots[: job.num_needed // self._ctx.block_size])
            replica.register_length(key[0], sending.owner, job.num_needed, entry, job.namespace)
            token = replica.token(key[0])
            done = HandoverDone(key[0], key[1], job.num_needed, checksum.to_bytes(8, "big"), token, replica.news())
            call = self._ctx.bus.call(sending.decode_node, done, answered, deadline_ns=sending.deadline_ns)
        except KVError as error:
            word.set_exception(error)
            return word
        word.add_done_callback(lambda over: call.cancel() if over.cancelled() else None)
        self._ctx.bus.flush()
        return word

    def _compute(self, effect: StartPrefill) -> None:
        key = (effect.request_id, effect.epoch)
        stop = self._stops[key] = threading.Event()
        arena = self._ctx.arena
        slots = tuple(ref.slot for ref in effect.refs)
        sending, now_ns = self._sending[key], self._ctx.clock.monotonic_ns
        copy = BlockCopy(effect.copy.src, effect.copy.dst, effect.copy.num_tokens) if effect.copy else None
        size, exact = self._ctx.block_size, self._ctx.exact
        whole = exact.all_exact(_begun(effect.start, size, effect.refs, effect.copy))
        computed = slots[effect.start // size if whole else -(-effect.start // size) :]

        def call() -> None:
            sink = SendingSink(arena, sending, slots, now_ns)
            run_prefill(self._model, arena, effect.tokens, effect.start, effect.stop, slots, sink, stop, copy)
            sending.computed_ns = now_ns()
            sink.send()

        began_ns = now_ns()
        running = self._ctx.compute.run(call)

        async def compute() -> PrefillEvent:
            error: KVError | None = None
            try:
                await asyncio.shield(running)
            except KVError as failure:
                error = failure
            del self._stops[key]
            ended_ns = now_ns()
            if error is None:
                exact.note(computed)
                self._cost.computed(effect.stop - effect.start, ended_ns - began_ns)
            return PrefillComputed(ended_ns, *key, error=error)

        self.start_job(("compute", *key), compute(), _as_event)

    async def _pull(self, effect: StartPull) -> PrefillEvent:
        """Read from their holder the blocks that are missing here."""
        key, plan = (effect.request_id, effect.epoch), effect.plan
        job = self.machine.job(*key)
        assert job is not None, effect
        end = plan.first_block + plan.num_blocks
        try:
            nbytes = await read_prefix(
                self._ctx,
                plan.holder,
                effect.namespace,
                effect.block_hash,
                effect.tokens[: end * self._ctx.block_size],
                plan.first_block,
                effect.refs,
                deadline_ns=job.deadline_ns,
                cause=effect.request_id,
            )
        except KVError as error:
            return Pulled(*key, error=error)
        return Pulled(*key, nbytes=nbytes)

    def _done(self, effect: ReplyDone) -> None:
        asked = self._asked.pop((effect.request_id, effect.epoch), None)
        if asked is not None and asked.message.retention is not None:
            retain_prompt(self._ctx, asked.message.namespace.namespace(), asked.message.tokens, asked.message.retention)
        metrics = self._ctx.metrics
        metrics.found_tokens("local", effect.local_tokens)
        metrics.found_tokens("peer", effect.pulled_tokens)
        metrics.found_tokens("computed", effect.computed_tokens)
        metrics.tokens.labels("prefill").inc(effect.computed_tokens)
        if asked is None:
            return
        stats = effect.stats
        asked.reply(
            PrefillDone(
                request_id=effect.request_id,
                epoch=effect.epoch,
                local_tokens=effect.local_tokens,
                pulled_tokens=effect.pulled_tokens,
                computed_tokens=effect.computed_tokens,
                bytes_moved=stats.nbytes,
                bytes_pulled=effect.bytes_pulled,
                units=stats.units,
                retries=stats.retries,
                transport=stats.transport,
                handover_ns=stats.duration_ns,
                queued_ns=effect.queued_ns,
                compute_ns=effect.compute_ns,
                tail_ns=stats.tail_ns,
            )
        )


def _begun(start: int, block_size: int, refs: Sequence[BlockRef], copy: CopyBlock | None) -> list[int]:
    """The slot of the block that is continued at `start`: it, or what it is copied from; none at a border."""
    if not start % block_size:
        return []
    return [copy.src.slot if copy is not None else refs[start // block_size].slot]


def _as_event(outcome: PrefillEvent | KVError) -> PrefillEvent:
    if isinstance(outcome, KVError):
        raise outcome
    return outcome
