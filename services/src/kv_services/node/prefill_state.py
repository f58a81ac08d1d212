"""Decides what a prefill node does next: whose prompt, from where its KV comes, when its blocks may go.

One prompt is fetched or computed at a time, in order of arrival, and matched against the pool at its turn, so that a
prompt whose prefix the one before it just computed finds it. Hand-overs overlap with the next prompts' turns.
Knows no bus, no transfer, no thread and no clock.

R1: a request that waits holds nothing.
R2: blocks are given back only when no fetch, computation or hand-over can touch them.
R3: each request is answered once: done, when every byte was verified at the decode node, or failed with the cause.
R4: what was computed is findable by the next prompt as soon as it is complete, though its hand-over still runs.
R5: an ended epoch stays ended.
R6: a request waits for what another node computes at most once, holding nothing and delaying nobody, and no longer than
    until that computation ends, its node dies, or the announced time is over.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kv_core.errors import KVError, LocalProtocolError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError, TenantQuotaError
from kv_prefix.in_flight import Wait
from kv_prefix.pool_types import PoolMatch
from kv_services.errors import (
    NodeDrainingError,
    NodeOverloadedError,
    PeerDiedError,
    RequestEndedError,
    RequestExpiredError,
    RequestTooLargeError,
)
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.fence import EpochFence
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
    PrefillDrainBegan,
    PrefillDrainEnded,
    PrefillEffect,
    PrefillEndAsked,
    PrefillEvent,
    PrefillPeerDied,
    PrefillTimePassed,
    PrepareBlocks,
    Pulled,
    PullPlan,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
    WaitOutcome,
)
from kv_services.node.prefill_job import JobState, PrefillJob

PullPlanner = Callable[[Sequence[BlockHash], int], PullPlan | None]
"""Given the prompt's block hashes and how many of them are here: what to fetch, or None when computing is cheaper."""

WaitPlanner = Callable[[Sequence[BlockHash], int, int], Wait | None]
"""Given the prompt's block hashes, how many of them are here or can be fetched, and the time: whether to wait."""


class PrefillMachine:
    """The prefill work of one node.

    Args:
        node_id: named in errors.
        pool: the node's slots.
        block_size: tokens per block.
        num_slots: slots of the pool.
        max_waiting: requests that may wait for their turn.
        plan_pull: asks the cluster's index and a cost model; no IO.
        plan_wait: pure; asks what other nodes compute just now. None: there are none.
    """

    def __init__(
        self,
        node_id: NodeId,
        pool: BlockPool,
        *,
        block_size: int,
        num_slots: int,
        max_waiting: int,
        plan_pull: PullPlanner,
        plan_wait: WaitPlanner | None = None,
    ) -> None:
        self._node_id = node_id
        self._pool = pool
        self._block_size = block_size
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._plan_pull = plan_pull
        self._plan_wait = plan_wait
        # The time of the last event that had one: a wait is judged by it, so at most a tick late.
        self._now_ns = 0
        self._fence = EpochFence(node_id)
        self._jobs: dict[RequestId, PrefillJob] = {}
        self._closing: dict[tuple[RequestId, int], PrefillJob] = {}
        self._waiting: deque[PrefillJob] = deque()
        self._awaiting: dict[RequestId, PrefillJob] = {}
        self._turn: PrefillJob | None = None
        self.draining = False

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting) + len(self._awaiting)

    @property
    def num_running(self) -> int:
        return len(self._jobs) - self.num_waiting + len(self._closing)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for their turn."""
        return sum(job.num_needed for job in self._waiting)

    def job(self, request_id: RequestId, epoch: int) -> PrefillJob | None:
        """The live or closing job of that epoch; callers may look but not touch."""
        live = self._jobs.get(request_id)
        return live if live is not None and live.epoch == epoch else self._closing.get((request_id, epoch))

    def awaits(self, owner: str) -> bool:
        """Whether some request waits for what that owner computes."""
        return any(job.wait is not None and job.wait.owner == owner for job in self._awaiting.values())

    def step(self, event: PrefillEvent) -> list[PrefillEffect]:
        now_ns = event.now_ns if isinstance(event, PrefillAsked | PrefillComputed | PrefillTimePassed) else None
        self._now_ns = max(self._now_ns, now_ns or 0)
        effects = self._handle(event)
        self._stop_waiting(lambda wait: self._now_ns >= wait.until_ns, gave_up=True)
        while self._turn is None and self._waiting:
            more = self._take_turn(now_ns)
            if not more:
                break
            effects += more
        return effects

    def check(self) -> None:
        """Assert R1, R6 and what ties jobs to the pool."""
        for job in self._jobs.values():
            assert (job.state in (JobState.WAITING, JobState.AWAITING)) == (job.table is None), job
            assert (job.state is JobState.AWAITING) == (job.request_id in self._awaiting), job
            assert job.failed is None, job
        for job in self._awaiting.values():
            assert job.wait is not None and self._now_ns < job.wait.until_ns, job
        for job in self._closing.values():
            assert job.busy and job.failed is not None, job
        turns = [job for job in (*self._jobs.values(), *self._closing.values()) if job.pulling or job.computing]
        assert len(turns) <= 1, turns
        assert turns == ([self._turn] if self._turn else []), turns

    def _handle(self, event: PrefillEvent) -> list[PrefillEffect]:
        match event:
            case PrefillAsked():
                return self._asked(event)
            case Pulled():
                return self._pulled(event)
            case PrefillComputed():
                return self._computed(event)
            case HandoverEnded():
                return self._handover_ended(event)
            case PrefillEndAsked(request_id, epoch, cause):
                self._fence.end(request_id, epoch)
                job = self._jobs.get(request_id)
                if job is None or job.epoch > epoch:
                    return []
                return self._fail(job, RequestEndedError(request_id=request_id, cause=cause))
            case PrefillPeerDied(node_id, cause):
                hit = [job for job in self._jobs.values() if node_id in (job.gateway, job.decode_node)]
                return [
                    effect
                    for job in hit
                    for effect in self._fail(job, PeerDiedError(request_id=job.request_id, peer=node_id, cause=cause))
                ]
            case AwaitedEnded(owner):
                self._stop_waiting(lambda wait: wait.owner == owner, gave_up=False)
                return []
            case PrefillDrainBegan():
                self.draining = True
                error = NodeDrainingError(node=self._node_id)
                unbegun = [*self._waiting, *self._awaiting.values()]
                return [effect for job in unbegun for effect in self._fail(job, error)]
            case PrefillDrainEnded():
                self.draining = False
                return []
            case PrefillTimePassed(now_ns):
                late = [job for job in self._jobs.values() if now_ns >= job.deadline_ns]
                return [effect for job in late for effect in self._fail(job, self._expired(job))]

    def _asked(self, event: PrefillAsked) -> list[PrefillEffect]:
        request_id, epoch = event.request_id, event.epoch
        live = self._jobs.get(request_id)
        if late := self._fence.late(request_id, epoch, live.epoch if live else 0):
            return [ReplyFailed(request_id, epoch, late)]
        effects: list[PrefillEffect] = []
        if live is not None:
            effects += self._fail(live, RequestEndedError(request_id=request_id, cause=f"epoch {epoch} began"))
        refusal = self._refusal(event)
        if refusal is not None:
            return [*effects, ReplyFailed(request_id, epoch, refusal)]
        job = PrefillJob(
            request_id=request_id,
            epoch=epoch,
            gateway=event.gateway,
            namespace=event.namespace,
            tokens=event.tokens,
            decode_node=event.decode_node,
            first_block=event.first_block,
            deadline_ns=event.deadline_ns,
            asked_ns=event.now_ns,
        )
        self._jobs[request_id] = job
        self._waiting.append(job)
        return effects

    def _refusal(self, event: PrefillAsked) -> KVError | None:
        need = self._blocks_for(len(event.tokens) - 1)
        if need > self._num_slots:
            return RequestTooLargeError(
                request_id=event.request_id, need=need, node=self._node_id, total=self._num_slots
            )
        if not 0 <= event.first_block < need:
            return LocalProtocolError(detail=f"{event.request_id}: no block {event.first_block} among {need}")
        if self.draining:
            return NodeDrainingError(node=self._node_id)
        if self.num_waiting >= self._max_waiting:
            return NodeOverloadedError(node=self._node_id, waiting=self.num_waiting, limit=self._max_waiting)
        return None

    def _take_turn(self, now_ns: int | None) -> list[PrefillEffect]:
        """Begin the next prompt, or let it wait for another node; nothing when there is no room for it."""
        job = self._waiting[0]
        if not job.hashes:
            job.hashes = hash_tokens(job.namespace, job.tokens[: job.num_needed])
        match = self._pool.match(job.namespace.digest, job.hashes, job.tokens)
        job.plan = self._plan_pull(job.hashes, len(match.refs))
        num_found = len(match.refs) + (job.plan.num_blocks if job.plan else 0)
        if job.wait is None and self._plan_wait is not None:
            wait = self._plan_wait(job.hashes, num_found, self._now_ns)
            if wait is not None and wait.until_ns > self._now_ns:
                self._waiting.popleft()
                job.wait, job.state = wait, JobState.AWAITING
                self._awaiting[job.request_id] = job
                return [NoteWaiting(job.request_id, job.epoch, wait)]
        try:
            self._open(job, match)
        except TenantQuotaError as error:
            # Nobody waits behind a tenant that has its share.
            return self._fail(job, error)
        except NoSpaceError:
            return []
        self._waiting.popleft()
        effects: list[PrefillEffect] = []
        if job.wait is not None:
            found = num_found >= job.wait.num_blocks
            lost = WaitOutcome.TIMED_OUT if job.gave_up else WaitOutcome.MISSING
            effects.append(NoteWaited(job.request_id, job.epoch, WaitOutcome.FOUND if found else lost))
        return [*effects, *self._begin(job, now_ns)]

    def _stop_waiting(self, which: Callable[[Wait], bool], *, gave_up: bool) -> None:
        """Let requests whose wait is over be the next to have their turn, in the order in which they came."""
        over = [job for job in self._awaiting.values() if job.wait is not None and which(job.wait)]
        for job in reversed(over):
            del self._awaiting[job.request_id]
            job.state, job.gave_up = JobState.WAITING, gave_up
            self._waiting.appendleft(job)

    def _begin(self, job: PrefillJob, now_ns: int | None) -> list[PrefillEffect]:
        """Fetch what is to be fetched, then compute the rest."""
        job.started_ns = job.asked_ns if now_ns is None else now_ns
        prepare = PrepareBlocks(tuple(job.refs[job.committed :]))
        if job.plan is not None:
            self._turn, job.state, job.pulling = job, JobState.PULLING, True
            first, num = job.plan.first_block, job.plan.num_blocks
            refs = tuple(job.refs[first : first + num])
            last = job.hashes[first + num - 1]
            pull = StartPull(job.request_id, job.epoch, job.namespace, job.plan, job.tokens, last, refs)
            return [prepare, pull]
        return [prepare, *self._compute_or_send(job)]

    def _open(self, job: PrefillJob, match: PoolMatch) -> None:
        """Open its table on what the pool has.

        Raises:
            NoSpaceError: there is no room, or none for its tenant.
        """
        num_matched = len(match.refs)
        num_new = self._blocks_for(job.num_needed) - num_matched
        use_partial = job.plan is None and num_new > 0
        opened = self._pool.open(job.request_id, match, num_new, use_partial=use_partial)
        job.table, job.refs, job.copy = opened.table, list(opened.refs), opened.copy
        num_found = opened.num_matched_tokens
        if num_found == job.num_needed and num_found > num_matched * self._block_size:
            # A part-filled last block is still to be copied, or sealed under its new generation, and both are done
            # by computing in it: its last token is computed again.
            num_found -= 1
        job.start, job.committed = num_found, num_matched
        job.local_tokens = num_found

    def _pulled(self, event: Pulled) -> list[PrefillEffect]:
        job = self._busy_job(event.request_id, event.epoch)
        job.pulling, self._turn = False, None
        if job.failed is not None:
            return self._maybe_release(job)
        if event.error is None and job.plan is not None:
            job.pulled_tokens = job.plan.num_blocks * self._block_size
            job.bytes_pulled = event.nbytes
            job.start += job.pulled_tokens
            self._commit(job, job.start // self._block_size)
        # A fetch that failed costs time, not the request: the rest is computed.
        return self._compute_or_send(job)

    def _compute_or_send(self, job: PrefillJob) -> list[PrefillEffect]:
        job.handover_open = True
        # Committing may replace blocks of the table; the hand-over keeps reading these.
        job.sending = self._pool.hold(f"{job.request_id} hand-over", job.refs)
        ready = min(job.start, job.num_needed) // self._block_size
        if job.start >= job.num_needed:
            ready = len(job.refs)
        opened = OpenHandover(job.request_id, job.epoch, job.decode_node, job.first_block, ready, tuple(job.refs))
        if job.start >= job.num_needed:
            job.state = JobState.SENDING
            return [opened, FinishHandover(job.request_id, job.epoch, job.num_needed)]
        self._turn, job.state, job.computing = job, JobState.COMPUTING, True
        compute = StartPrefill(
            job.request_id, job.epoch, job.tokens, job.start, job.num_needed, tuple(job.refs), job.copy
        )
        coming = tuple(job.hashes[job.start // self._block_size :])
        if not coming:
            return [opened, compute]
        num_tokens = job.num_needed - job.start
        announce = AnnounceBlocks(job.request_id, job.epoch, coming, num_tokens, job.deadline_ns)
        job.announced = True
        return [opened, announce, compute]

    def _computed(self, event: PrefillComputed) -> list[PrefillEffect]:
        job = self._busy_job(event.request_id, event.epoch)
        job.computing, self._turn = False, None
        self._drop_copy(job)
        # Whoever waits for these blocks is told last, when they can be found.
        over = [WithdrawBlocks(job.request_id, job.epoch)] if job.announced else []
        if job.failed is not None:
            return [*self._maybe_release(job), *over]
        if event.error is not None:
            return [*self._fail(job, event.error), *over]
        job.compute_ns = event.now_ns - job.started_ns
        job.state = JobState.SENDING
        self._commit(job, job.num_needed // self._block_size)
        return [FinishHandover(job.request_id, job.epoch, job.num_needed), *over]

    def _handover_ended(self, event: HandoverEnded) -> list[PrefillEffect]:
        job = self._busy_job(event.request_id, event.epoch)
        job.handover_open = False
        if job.failed is not None:
            return self._maybe_release(job)
        if isinstance(event.result, KVError):
            return self._fail(job, event.result)
        if job.computing:
            raise LocalProtocolError(detail=f"hand-over of {job.request_id} was complete before its KV was")
        del self._jobs[job.request_id]
        self._fence.end(job.request_id, job.epoch)
        if job.num_needed % self._block_size and job.table is not None:
            full = job.num_needed // self._block_size * self._block_size
            self._pool.commit_tail(job.table, job.namespace.digest, job.tokens[full : job.num_needed])
        self._release(job)
        done = ReplyDone(
            job.request_id,
            job.epoch,
            min(job.local_tokens, job.num_needed),
            job.pulled_tokens,
            max(0, job.num_needed - job.start),
            job.bytes_pulled,
            event.result,
            max(0, job.started_ns - job.asked_ns),
            job.compute_ns,
        )
        return [done]

    def _fail(self, job: PrefillJob, error: KVError) -> list[PrefillEffect]:
        """End a request badly: answer now, give its blocks back when nobody touches them any more."""
        job.failed = error
        del self._jobs[job.request_id]
        self._fence.end(job.request_id, job.epoch)
        effects: list[PrefillEffect] = [ReplyFailed(job.request_id, job.epoch, error)]
        if job.state is JobState.WAITING:
            self._waiting.remove(job)
        self._awaiting.pop(job.request_id, None)
        if job.computing:
            effects.append(CancelCompute(job.request_id, job.epoch))
        if job.handover_open:
            effects.append(AbortHandover(job.request_id, job.epoch, error))
        if job.busy:
            self._closing[job.request_id, job.epoch] = job
        else:
            self._release(job)
        return effects

    def _maybe_release(self, job: PrefillJob) -> list[PrefillEffect]:
        if not job.busy:
            del self._closing[job.request_id, job.epoch]
            self._release(job)
        return []

    def _release(self, job: PrefillJob) -> None:
        self._drop_copy(job)
        for receipt in (job.sending, job.table):
            if receipt is not None:
                self._pool.release(receipt)
        job.sending = job.table = None

    def _drop_copy(self, job: PrefillJob) -> None:
        if job.copy is not None:
            self._pool.release(job.copy.receipt)
            job.copy = None

    def _commit(self, job: PrefillJob, num_full: int) -> None:
        first = job.committed
        if job.table is None or num_full <= first:
            return
        tokens = job.tokens[first * self._block_size : num_full * self._block_size]
        hashes = job.hashes[first:num_full]
        job.refs[first:num_full] = self._pool.commit(job.table, job.namespace.digest, first, hashes, tokens)
        job.committed = num_full

    def _busy_job(self, request_id: RequestId, epoch: int) -> PrefillJob:
        job = self.job(request_id, epoch)
        if job is None or not job.busy:
            raise LocalProtocolError(detail=f"{request_id} epoch {epoch} has nothing under way")
        return job

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _expired(self, job: PrefillJob) -> KVError:
        return RequestExpiredError(request_id=job.request_id, node=self._node_id, state=job.state.value)


__all__ = ["HandoverStats", "JobState", "PrefillJob", "PrefillMachine", "PullPlanner"]
