"""Remembers the prompts of a process's latest requests, so that an operator can ask for them by a request's id."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kv_core.namespace import Namespace

PAST_REQUESTS_MAX: Final = 256
PAST_BYTES_MAX: Final = 32 << 20
"""Tokens of past requests; the latest is remembered whatever its length."""


class PastRequests:
    """The prompts of the latest requests of one process, by their ids."""

    def __init__(self, limit: int = PAST_REQUESTS_MAX, bytes_max: int = PAST_BYTES_MAX) -> None:
        self._limit, self._bytes_max = limit, bytes_max
        self._nbytes = 0
        self._prompts: OrderedDict[str, tuple[Namespace, bytes]] = OrderedDict()
        self._listeners: list[Callable[[Namespace, bytes], None]] = []

    def listen(self, listener: Callable[[Namespace, bytes], None]) -> None:
        """Call `listener` with each prompt from now on."""
        self._listeners.append(listener)

    def note(self, request_id: str, namespace: Namespace, tokens: bytes) -> None:
        """Remember a request."""
        former = self._prompts.pop(request_id, None)
        self._nbytes += len(tokens) - (len(former[1]) if former else 0)
        self._prompts[request_id] = namespace, tokens
        while len(self._prompts) > self._limit or (self._nbytes > self._bytes_max and len(self._prompts) > 1):
            self._nbytes -= len(self._prompts.popitem(last=False)[1][1])
        for listener in self._listeners:
            listener(namespace, tokens)

    def get(self, request_id: str) -> tuple[Namespace, bytes] | None:
        """Its namespace and tokens, if it is remembered."""
        return self._prompts.get(request_id)
