"""Tells other routers what a node holds: events on a PUB socket, replays of the latest ones on a ROUTER.

Off unless the cluster file gives ports. Events carry tokens, so only namespaces of the tenants that are named are told.
The latest `REPLAY_MAX` batches are kept; a follower that missed more asks in vain and must begin anew.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_prefix.events import BlocksStored, PoolEvent, Tier
from kv_services.kv_events.wire import (
    END_OF_REPLAY,
    BadEventError,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    encode_batch,
    medium_of,
    read_sequence,
    sequence_bytes,
)

REPLAY_MAX: Final = 10_000
REPLAY_BYTES_MAX: Final = 64 << 20
HWM: Final = 100_000
BATCHES_A_TURN: Final = 64
"""Batches replayed in one turn of the loop: whoever asks for all of them holds up nothing."""
ASKS_MAX: Final = 64
"""Replays under way; further ones wait in the socket."""
_POLL_S: Final = 0.05

_log = logging.getLogger(__name__)


class EventsBindError(KVError):
    """An address for KV events cannot be had."""

    code = 7052
    template = "cannot serve KV events on {endpoint}: {cause}"


class EventPublisher:
    """A supervised child: `start`, `run`, `close`.

    Args:
        events: where to publish, `tcp://127.0.0.1:5557`.
        replay: where replays are asked for.
        told: whether blocks of a namespace digest may be told.
    """

    def __init__(
        self, events: str, replay: str, block_size: int, clock: Clock, told: Callable[[bytes], bool], topic: bytes = b""
    ) -> None:
        self._endpoints = events, replay
        self._block_size = block_size
        self._clock = clock
        self._told = told
        self._topic = topic
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_MAX)
        self._kept_bytes = 0
        self._asked: deque[tuple[bytes, int]] = deque()
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            EventsBindError: an address cannot be had.
        """
        self._closed = asyncio.Event()
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket, endpoint in zip((self._pub, self._router), self._endpoints, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HWM)
            socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise EventsBindError(endpoint=endpoint, cause=error.strerror or str(error)) from error

    async def run(self) -> None:
        """Answer replays until closed."""
        assert self._closed is not None
        while not self._closed.is_set():
            busy = self._answer_some()
            try:
                await asyncio.wait_for(self._closed.wait(), 0.0 if busy else _POLL_S)
            except TimeoutError:
                continue

    async def close(self) -> None:
        if self._closed is not None and not self._closed.is_set():
            self._closed.set()
            self._pub.close(0)
            self._router.close(0)
            self._context.term()

    def pool_events(self, events: Sequence[PoolEvent]) -> None:
        """Tell what the pool stored and removed."""
        told = [one for event in events if self._told(event.namespace) for one in self._told_as(event)]
        if told and self._closed is not None and not self._closed.is_set():
            payload = encode_batch(EventBatch(self._clock.wall_ns() / 1e9, told))
            self._keep(payload)
            try:
                self._pub.send_multipart([self._topic, sequence_bytes(self._sequence), payload], zmq.NOBLOCK)
            except zmq.Again:
                # A follower notices the hole and asks for a replay.
                _log.warning("event not published sequence=%d cause=followers are slow", self._sequence)
            self._sequence += 1

    def _told_as(self, event: PoolEvent) -> list[KVEvent]:
        medium = medium_of(Tier.HOST)
        if isinstance(event, BlocksStored):
            if event.extras:
                return []  # their content is not in an event
            tokens = list(memoryview(event.tokens).cast("I"))
            return [
                BlockStored(
                    block_hashes=[name.sequence for name in event.block_hashes],
                    parent_block_hash=event.parent.sequence if event.parent else None,
                    token_ids=tokens,
                    block_size=self._block_size,
                    medium=medium,
                )
            ]
        return [BlockRemoved(block_hashes=[event.block_hash.sequence], medium=medium)]

    def _keep(self, payload: bytes) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept[0][1])
        self._kept.append((self._sequence, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_some(self) -> bool:
        """Go on with the replay that waits longest; whether one is under way."""
        while len(self._asked) < ASKS_MAX and self._take_ask():
            pass
        if not self._asked:
            return False
        route, start = self._asked.popleft()
        first = max(0, start - self._kept[0][0]) if self._kept else 0
        some = list(itertools.islice(self._kept, first, first + BATCHES_A_TURN))
        try:
            for sequence, payload in some:
                self._router.send_multipart([route, b"", sequence_bytes(sequence), payload], zmq.NOBLOCK)
            if len(some) == BATCHES_A_TURN:
                self._asked.append((route, some[-1][0] + 1))
            else:
                self._router.send_multipart([route, b"", sequence_bytes(END_OF_REPLAY), b""], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("replay broken off cause=the follower is slow")
        return bool(self._asked)

    def _take_ask(self) -> bool:
        """Take the next question for a replay; False when there is none."""
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            if len(frames) != 3 or frames[1]:
                raise BadEventError("expected an empty frame and a sequence number")
            self._asked.append((frames[0], read_sequence(frames[2])))
        except BadEventError as error:
            _log.info("replay refused cause=%s", error)
        return True
