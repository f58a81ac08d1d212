"""A stand-in for an engine outside the cluster: its KV events over ZeroMQ, in vLLM's form, written byte by byte here.

Nothing of the code under test takes part: events are plain maps, packed by msgpack's own library.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

from kv_bus.ports import pick_ports

Event = dict[str, Any]
SENT_S = 1_766_000_000.25
SENT = "2025-12-17T19:33:20.250+00:00"


def stored(hashes: Sequence[int], tokens: Sequence[int], parent: int | None = None, **more: object) -> Event:
    """A `BlockStored` of vLLM 0.11: consecutive blocks of equal size."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": len(tokens) // len(hashes),
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(*hashes: int, medium: str = "GPU") -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED: Event = {"type": "AllBlocksCleared"}


class EngineStandIn:
    """Publishes events, and answers replays when the test says so. Use as a context.

    Attributes:
        kept_from: the number of the oldest batch that a replay can still give.
    """

    def __init__(self) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
        self.kept_from = 0
        self._log: list[bytes] = []

    def __enter__(self) -> "EngineStandIn":
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.bind(self.events)
        self._router.bind(self.replay)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    @property
    def num_told(self) -> int:
        return len(self._log)

    def tell(self, *events: Event, lost: bool = False) -> int:
        """One batch; a lost one is numbered and kept, and reaches nobody. Gives its number."""
        number = len(self._log)
        self._log.append(msgpack.packb([SENT_S, list(events), 0]))
        if not lost:
            self._send(number)
        return number

    def begin_anew(self) -> None:
        """Its process starts again: numbers from 0, and nothing to replay of before."""
        self._log.clear()
        self.kept_from = 0

    def answer_replays(self) -> int:
        """Answer what was asked so far, with whatever is kept; how many asked."""
        answered = 0
        while self._router.poll(0):
            route, _, start = self._router.recv_multipart()
            answered += 1
            for number in range(max(int.from_bytes(start, "big"), self.kept_from), len(self._log)):
                self._router.send_multipart([route, b"", number.to_bytes(8, "big"), self._log[number]])
            self._router.send_multipart([route, b"", (-1).to_bytes(8, "big", signed=True), b""])
        return answered

    def _send(self, number: int) -> None:
        self._pub.send_multipart([b"kv-events", number.to_bytes(8, "big"), self._log[number]])
