"""Dynamo's prefix index, measured from another process: `PYTHON bench/peers/dynamo_peer.py`, one JSON answer a line.

Runs under the interpreter of an environment that has `ai-dynamo-runtime` (1.6 was measured), with nothing of ours. It
reads one command a line and answers with a list of seconds; the data have the size and kind of ours.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

NUM_HOLDERS = 8
CHAIN_BLOCKS = 512
EVENT_BLOCKS = 64
SWEPT = 64 << 20


class Peer:
    """One tree and what was put into it."""

    def __init__(self) -> None:
        self.core: Any = import_module("dynamo._core")
        self.tree = self.core.RadixTree()
        self.chains: list[list[int]] = []
        self.junk = bytearray(SWEPT)

    def hash(self, num_tokens: int, repeats: int) -> list[float]:
        tokens = random.Random(1).choices(range(1 << 32), k=num_tokens)
        return [timed(lambda: self.core.compute_block_hash_for_seq(tokens, 16)) for _ in range(repeats)]

    def fill(self, num_blocks: int) -> list[float]:
        """Chains of 512 blocks, each with one holder more than the last (1 to 8); the time of each event of 64."""
        draw = random.Random(2)
        self.tree = self.core.RadixTree()
        self.chains = [[draw.getrandbits(63) for _ in range(CHAIN_BLOCKS)] for _ in range(num_blocks // CHAIN_BLOCKS)]
        taken = []
        for number, chain in enumerate(self.chains):
            made = events(chain, number * CHAIN_BLOCKS)
            for holder in range(number % NUM_HOLDERS + 1):
                for event in made:
                    began = time.process_time()
                    self.tree.apply_event(holder, event)
                    taken.append(time.process_time() - began)
        return taken

    def lookup(self, repeats: int, swept: bool) -> list[float]:
        draw = random.Random(3)
        taken = []
        for _ in range(repeats):
            chain = draw.choice(self.chains[NUM_HOLDERS - 1 :: NUM_HOLDERS])
            if swept:
                sweep(self.junk)
            else:
                self.tree.find_matches(chain)
            began = time.process_time()
            self.tree.find_matches(chain)
            taken.append(time.process_time() - began)
        return taken


def events(chain: list[int], first: int) -> list[bytes]:
    """A chain as events; a block's own number stands for its sequence hash."""
    made = []
    for start in range(0, len(chain), EVENT_BLOCKS):
        blocks = [
            {"block_hash": first + start + i + 1, "tokens_hash": name, "mm_extra_info": None}
            for i, name in enumerate(chain[start : start + EVENT_BLOCKS])
        ]
        stored = {"parent_hash": first + start if start else None, "blocks": blocks}
        made.append(json.dumps({"event_id": 1, "data": {"stored": stored}, "dp_rank": 0}).encode())
    return made


def sweep(junk: bytearray) -> None:
    """Reads and writes every cache line of more memory than the caches hold."""
    view = memoryview(junk)
    view[::64] = bytes(len(view[::64]))


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    peer = Peer()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
