"""A node's engine in virtual time: one call after the other, each after a pause that stands for its computing."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeVar

from kv_services.node.compute import outcome_is_seen

T = TypeVar("T")
CALL_MEAN_S: Final = 0.02
"""So long that fetching a prefix from another node is often quicker than computing it."""


class SimCompute:
    """A `kv_services.node.compute.Compute` without a thread.

    Args:
        rng: draws how long a call takes.
        slowness: asked for the factor by which this node is slower than others now.
    """

    def __init__(self, rng: Random, slowness: Callable[[], float]) -> None:
        self._random = rng
        self._slowness = slowness
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def run(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """See `Compute.run`."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.cancel()
            return future
        future.add_done_callback(outcome_is_seen)
        self._waiting.append((call, future))
        if self._idle.is_set():
            self._begin()
        return future

    async def close(self) -> None:
        """See `Compute.close`."""
        self._closed = True
        # The first is under way.
        for _, future in list(self._waiting)[1:]:
            future.cancel()
        await self._idle.wait()

    def _begin(self) -> None:
        self._idle.clear()
        delay_s = self._random.expovariate(1 / CALL_MEAN_S) * self._slowness()
        asyncio.get_running_loop().call_later(delay_s, self._end)

    def _end(self) -> None:
        call, future = self._waiting.popleft()
        try:
            result = call()
        except Exception as error:  # whatever it is, it is the caller's
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)
        while self._waiting and self._waiting[0][1].cancelled():
            self._waiting.popleft()
        if self._waiting:
            self._begin()
        else:
            self._idle.set()
