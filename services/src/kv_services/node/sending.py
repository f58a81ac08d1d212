"""A prefill's layers on their way to the decode node: written in the compute thread, handed over on the loop.

A layer that took long leaves as soon as it is written, so that the transfer overlaps the layers behind it. Layers that
follow each other more quickly than a hand-over step costs leave together: waking the loop for each would take longer
than computing them, since the two threads share one interpreter.

SE1: what is complete before the hand-over could be opened is sent when it is. SE2: a layer is held for less than
`HOLD_NS` of computing, and never beyond the end of the computation.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from kv_consistency.update import OwnerEpoch
from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_services.node.prefill_events import OpenHandover
from kv_transport import Handover

HOLD_NS: Final = 1_000_000


class Opened(Protocol):
    """What is used of a `kv_transport.Handover` here."""

    def submit(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None: ...

    def submit_threadsafe(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None: ...


class Sealing(Protocol):
    """Where the blocks lie."""

    def seal(self, layer: int, slots: Iterable[int]) -> None: ...


class Sending:
    """One hand-over at the sender, and the layers that were written before it could be opened."""

    def __init__(self, effect: OpenHandover, deadline_ns: int, owner: OwnerEpoch) -> None:
        self.owner = owner
        self.refs = effect.refs
        self.first_block = effect.first_block
        self.ready_blocks = effect.ready_blocks
        self.decode_node = effect.decode_node
        self.deadline_ns = deadline_ns
        self.finish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.aborted: KVError | None = None
        self.handover: Handover | None = None
        self.computed_ns = 0
        """When the last layer was computed; 0 until then, and if nothing was to be computed."""
        self.word: asyncio.Future[None] | None = None
        """The decode node's answer to what the checksum over everything is, once it was told."""
        self._handover: Opened | None = None
        self._early: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def written(self, layers: Sequence[tuple[int, int, int]]) -> None:
        """In the compute thread: send what the decode node lacks of these (layer, first block, end block)."""
        with self._lock:
            handover = self._handover
            if handover is None:
                self._early += layers
                return
        for layer, first_block, end_block in layers:
            first = max(first_block, self.first_block)
            if first < end_block:
                handover.submit_threadsafe(layer, self.refs[first:end_block], first - self.first_block)

    def begin(self, handover: Opened, num_layers: int) -> None:
        """On the loop: send what was complete before, layer by layer, then what was written meanwhile."""
        if self.ready_blocks > self.first_block:
            blocks = self.refs[self.first_block : self.ready_blocks]
            for layer in range(num_layers):
                handover.submit(layer, blocks, 0)
        with self._lock:
            early, self._early = self._early, []
            self._handover = handover
        for layer, first_block, end_block in early:
            first = max(first_block, self.first_block)
            if first < end_block:
                handover.submit(layer, self.refs[first:end_block], first - self.first_block)


class SendingSink:
    """Seals what is written, and hands over what the decode node lacks of it. Made and used in the compute thread."""

    def __init__(self, arena: Sealing, sending: Sending, slots: Sequence[int], now_ns: Callable[[], int]) -> None:
        self._arena = arena
        self._sending = sending
        self._slots = slots
        self._now_ns = now_ns
        self._sent_ns = now_ns()
        self._held: list[tuple[int, int, int]] = []

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
        self._arena.seal(layer, self._slots[first_block:end_block])
        self._held.append((layer, first_block, end_block))
        if self._now_ns() - self._sent_ns >= HOLD_NS:
            self.send()

    def send(self) -> None:
        """Hand over what is held."""
        held, self._held = self._held, []
        self._sending.written(held)
        self._sent_ns = self._now_ns()
