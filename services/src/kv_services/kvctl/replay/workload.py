"""Seeded workloads for those who have no trace: what kinds of traffic do to a prefix cache.

Blocks are numbered so that an id stands for its whole prefix, as in a recorded trace. The same kind, size and seed give
the same requests in every process.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kv_services.kvctl.replay.errors import ReplayRequestError
from kv_services.kvctl.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

_MEAN_GAP_MS: Final = 300.0


@dataclass(slots=True)
class _Ids:
    """Hands out an id for each (parent, content), the same one when asked again."""

    known: dict[tuple[int, object], int] = field(default_factory=dict)

    def extend(self, prefix: tuple[int, ...], contents: Iterator[object]) -> tuple[int, ...]:
        ids = list(prefix)
        for content in contents:
            parent = ids[-1] if ids else -1
            ids.append(self.known.setdefault((parent, content), len(self.known)))
        return tuple(ids)

    def fresh(self, prefix: tuple[int, ...], count: int) -> tuple[int, ...]:
        """`count` blocks that nobody has seen."""
        first = len(self.known)
        return self.extend(prefix, ((first, i) for i in range(count)))


def _chat(draw: random.Random, ids: _Ids) -> Iterator[tuple[int, ...]]:
    """Many conversations of several turns over a few system prompts; each turn sends all before it again."""
    systems = [ids.fresh((), draw.randint(1, 4)) for _ in range(4)]
    open_chats: list[tuple[int, ...]] = []
    while True:
        if not open_chats or draw.random() < 0.35:
            open_chats.append(systems[min(int(draw.expovariate(1.0)), len(systems) - 1)])
        # Whoever spoke lately is likelier to speak again.
        at = max(len(open_chats) - 1 - int(draw.expovariate(1 / 40)), 0)
        open_chats[at] = prompt = ids.fresh(open_chats[at], 1 + int(draw.expovariate(1 / 3)))
        if len(prompt) > 200 or draw.random() < 0.2:
            del open_chats[at]
        yield prompt


def _documents(draw: random.Random, ids: _Ids) -> Iterator[tuple[int, ...]]:
    """Questions about documents of which some are popular (Zipf); every question is new."""
    documents = [ids.fresh((), 5 + int(draw.expovariate(1 / 25))) for _ in range(600)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    while True:
        (document,) = draw.choices(documents, weights)
        yield ids.fresh(document, 1)


def _agents(draw: random.Random, ids: _Ids) -> Iterator[tuple[int, ...]]:
    """Twenty agents at a time, each in a long loop of tool calls over one of a few long system prompts."""
    systems = [ids.fresh((), 12) for _ in range(3)]
    running = [systems[i % 3] for i in range(20)]
    while True:
        at = draw.randrange(len(running))
        running[at] = prompt = ids.fresh(running[at], 1 + int(draw.random() * 3))
        if len(prompt) > 120:
            running[at] = draw.choice(systems)
        yield prompt


def _drift(draw: random.Random, ids: _Ids) -> Iterator[tuple[int, ...]]:
    """What is popular moves on steadily and never comes back: yesterday's counts say nothing."""
    topics: list[tuple[int, ...]] = []
    for step in range(1 << 62):
        if step % 12 == 0:
            topics.append(ids.fresh((), draw.randint(4, 20)))
        yield ids.fresh(topics[max(len(topics) - 1 - int(draw.expovariate(1 / 25)), 0)], 1)


def _scan(draw: random.Random, ids: _Ids) -> Iterator[tuple[int, ...]]:
    """Popular documents between long one-off prompts, which wash through the cache."""
    popular = _documents(draw, ids)
    while True:
        yield next(popular) if draw.random() < 0.5 else ids.fresh((), draw.randint(20, 120))


_KINDS: Final[dict[str, Callable[[random.Random, _Ids], Iterator[tuple[int, ...]]]]] = {
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
    "drift": _drift,
    "scan": _scan,
}
KINDS: Final = tuple(_KINDS)


def generate(kind: str, num_requests: int, seed: int) -> Iterator[TraceRequest]:
    """Requests of one of `KINDS`.

    Raises:
        ReplayRequestError: no such kind.
    """
    if kind not in _KINDS:
        raise ReplayRequestError(option="kind", reason=f"unknown {kind!r}; known are {', '.join(KINDS)}")
    prompts = _KINDS[kind](random.Random(f"{seed}/{kind}"), _Ids())
    clock = random.Random(f"{seed}/{kind}/clock")
    now_ms = 0.0
    for _ in range(num_requests):
        hash_ids = next(prompts)
        length = len(hash_ids) * TRACE_BLOCK_TOKENS - clock.randrange(TRACE_BLOCK_TOKENS)
        yield TraceRequest(round(now_ms), length, 1 + int(clock.expovariate(1 / 300)), hash_ids)
        now_ms += clock.expovariate(1 / _MEAN_GAP_MS)
