"""Hears one engine's events and enters them into a prefix index; asks for what it missed.

A supervised child: `start`, `run`, `close`. What the events mean is decided by `follow_state`.
"""

import asyncio
import itertools
import logging
import struct
from typing import Final

import zmq

from kv_core.ids import Incarnation
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.kv_events.follow_state import AskReplay, Cleared, Effect, EngineFollower, Removed, Stored
from kv_services.kv_events.wire import END_OF_REPLAY, MAX_BATCH_BYTES, BadEventError, decode_batch, read_sequence
from kv_services.kv_events.wire import sequence_bytes as as_frame

REPLAY_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.01
BATCHES_A_TURN: Final = 64
ENDS_A_TURN: Final = 1_000
"""Of blocks that ended by the thousand, written down between two looks at the sockets: less than a millisecond."""
ASKS_MAX: Final = 16
"""Replays that are asked for and not sent yet, while nobody listens where they are answered."""
GONE_S: Final = 10.0
"""How long an engine may be out of reach before what is known of it is dropped."""
_MONITORS: Final = itertools.count(1)
_EVENT: Final = struct.Struct("=hi")

_log = logging.getLogger(__name__)


class EngineEvents:
    """See the module.

    Args:
        holder: the engine, as the index shall name it; a cleared engine continues as its next incarnation.
        events: the engine's PUB endpoint.
        replay: its ROUTER endpoint.
    """

    def __init__(self, holder: Holder, events: str, replay: str, follower: EngineFollower, index: PrefixIndex) -> None:
        self.holder = holder
        self.follower = follower
        self.refused = 0
        self._endpoints = events, replay
        self._index = index
        self._replay_until: float | None = None
        self._gone_at: float | None = None
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._dealer = self._context.socket(zmq.DEALER)
        # A name that is never used again: one after a descriptor collides when the descriptor is reused.
        name = f"inproc://kv-followed-{next(_MONITORS)}"
        self._sub.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(name)
        for socket, endpoint in zip((self._sub, self._dealer), self._endpoints, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.setsockopt(zmq.SNDHWM, ASKS_MAX)
            socket.connect(endpoint)

    async def run(self) -> None:
        """Hear until closed."""
        assert self._closed is not None
        while not self._closed.is_set():
            heard, tidying = self._hear(), self.follower.record.tidy(ENDS_A_TURN)
            busy = heard or tidying
            self._look_at_connection()
            now_s = asyncio.get_running_loop().time()
            if self._replay_until is not None and now_s >= self._replay_until:
                _log.warning("no replay holder=%s: what is known of it is dropped", self.holder.node)
                self._replay_until = None
                self._perform(self.follower.replay_missed())
            if self._gone_at is not None and now_s >= self._gone_at:
                _log.warning("out of reach holder=%s: what is known of it is dropped", self.holder.node)
                self._gone_at = self._replay_until = None
                self._perform(self.follower.unreachable())
            try:
                await asyncio.wait_for(self._closed.wait(), 0.0 if busy else POLL_S)
            except TimeoutError:
                continue

    async def close(self) -> None:
        if self._closed is not None and not self._closed.is_set():
            self._closed.set()
            self._sub.disable_monitor()
            self._monitor.close(0)
            self._sub.close(0)
            self._dealer.close(0)
            self._context.term()
        self._index.remove_holder(self.holder)

    def _hear(self) -> bool:
        """Some of what has come, replays first; whether there may be more."""
        heard = 0
        for socket, skip in ((self._dealer, 1), (self._sub, 1)):
            while heard < BATCHES_A_TURN:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                heard += 1
                try:
                    if len(frames) != skip + 2:
                        raise BadEventError(f"{len(frames)} frames")
                    sequence = read_sequence(frames[skip])
                    if sequence == END_OF_REPLAY and socket is self._dealer:
                        self._replay_over()
                    elif sequence < 0:
                        raise BadEventError(f"sequence number {sequence}")
                    else:
                        batch, replayed = decode_batch(frames[skip + 1]), socket is self._dealer
                        self._perform(self.follower.batch(sequence, batch.events, replayed=replayed, sent_s=batch.ts))
                except BadEventError as error:
                    self.refused += 1
                    _log.warning("event refused holder=%s cause=%s", self.holder.node, error)
        return heard >= BATCHES_A_TURN

    def _look_at_connection(self) -> None:
        """Notice an engine that goes, and one that is back before it counts as gone."""
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number, _ = _EVENT.unpack(frames[0])
            if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._gone_at is not None:
                    self._perform(self.follower.reconnected())
                self._gone_at = None
            elif number == zmq.EVENT_DISCONNECTED:
                self._gone_at = asyncio.get_running_loop().time() + GONE_S

    def _replay_over(self) -> None:
        self._perform(self.follower.replay_ended())
        if not self.follower.num_replays:
            self._replay_until = None

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Stored(tier, names):
                    self._index.stored(self.holder, tier, names, consecutive=True)
                case Removed(tier, names):
                    self._index.removed(self.holder, tier, names)
                case Cleared():
                    self._index.remove_holder(self.holder)
                    self.holder = Holder(self.holder.node, Incarnation(self.holder.incarnation + 1))
                case AskReplay(start):
                    self._replay_until = asyncio.get_running_loop().time() + REPLAY_TIMEOUT_S
                    try:
                        self._dealer.send_multipart([b"", as_frame(start)], zmq.NOBLOCK)
                    except zmq.Again:
                        # It answers no replays, and has as many questions as it may: what waits is given up in time.
                        _log.warning("replay not asked for holder=%s cause=none is answered", self.holder.node)
