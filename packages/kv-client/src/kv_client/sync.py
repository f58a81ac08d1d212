"""The client for code without an event loop: the same calls, each of which blocks until it is done or its deadline.

Y1: no call waits for a loop that does not run: before `start` and after `close` it is refused.
Y2: what a caller stops waiting for (an interrupt, a close in another thread) is ended, and gives back what it took.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kv_client.blocks import PrefixBlocks
from kv_client.client import Client
from kv_client.config import ClientConfig
from kv_client.errors import AlreadyReleased
from kv_client.messages import PrefixFound
from kv_client.puts import PinnedPrefix, StoredPrefix
from kv_core.hashing import BlockHash, Tokens
from kv_core.namespace import Namespace
from kv_transport import TransferStats
from kv_transport.arena import StoredArray

T = TypeVar("T")


class SyncPrefixBlocks:
    """`PrefixBlocks` for code without a loop; leaving it as a context releases it."""

    def __init__(self, client: "SyncClient", blocks: PrefixBlocks) -> None:
        self._client, self.blocks = client, blocks

    def layer_ready(self, layer: int) -> None:
        """As `PrefixBlocks.layer_ready`."""
        self._client._run(self.blocks.layer_ready(layer))

    def wait(self) -> TransferStats:
        """As `PrefixBlocks.wait`."""
        return self._client._run(self.blocks.wait())

    def array(self, layer: int) -> StoredArray:
        """As `PrefixBlocks.array`."""
        return self.blocks.array(layer)

    def release(self) -> None:
        """As `PrefixBlocks.release`."""
        self._client._run(self._client._client.release(self.blocks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SyncClient:
    """`Client` on a thread with a loop of its own. Use as `with SyncClient(config) as client:`, from any thread."""

    def __init__(self, config: ClientConfig) -> None:
        self._client = Client(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client {config.node_id}", daemon=True)
        self._gate = threading.Lock()
        self._running = False

    def start(self) -> None:
        """As `Client.start`."""
        with self._gate:
            if self._loop.is_closed() or self._thread.is_alive():
                raise AlreadyReleased(what="a client that was started before")
            self._thread.start()
            self._running = True
        try:
            self._run(self._client.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """As `Client.close`; calls of other threads end with an error."""
        if self._running:
            self._run(self._client.close())
        self._stop()

    def lookup(self, namespace: Namespace, tokens: Tokens, *, timeout_ms: int | None = None) -> PrefixFound:
        """As `Client.lookup`."""
        return self._run(self._client.lookup(namespace, tokens, timeout_ms=timeout_ms))

    def batch_exists(self, names: Sequence[BlockHash], *, timeout_ms: int | None = None) -> list[bool]:
        """As `Client.batch_exists`."""
        return self._run(self._client.batch_exists(names, timeout_ms=timeout_ms))

    def put_blocks(
        self, namespace: Namespace, tokens: Tokens, layers: Sequence[StoredArray], *, timeout_ms: int | None = None
    ) -> StoredPrefix:
        """As `Client.put_blocks`."""
        return self._run(self._client.put_blocks(namespace, tokens, layers, timeout_ms=timeout_ms))

    def get_blocks(
        self, namespace: Namespace, tokens: Tokens, num_blocks: int, *, timeout_ms: int | None = None
    ) -> SyncPrefixBlocks:
        """As `Client.get_blocks`."""
        return SyncPrefixBlocks(
            self, self._run(self._client.get_blocks(namespace, tokens, num_blocks, timeout_ms=timeout_ms))
        )

    def pin(
        self, namespace: Namespace, tokens: Tokens, num_blocks: int, *, timeout_ms: int | None = None
    ) -> PinnedPrefix:
        """As `Client.pin`."""
        return self._run(self._client.pin(namespace, tokens, num_blocks, timeout_ms=timeout_ms))

    def release(self, what: SyncPrefixBlocks | PinnedPrefix, *, timeout_ms: int | None = None) -> None:
        """As `Client.release`."""
        inner = what.blocks if isinstance(what, SyncPrefixBlocks) else what
        self._run(self._client.release(inner, timeout_ms=timeout_ms))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if not self._running:
                work.close()
                raise AlreadyReleased(what="the client")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise AlreadyReleased(what="the client") from None
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        with self._gate:
            running, self._running = self._running, False
        if running:
            asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._thread.is_alive():
            self._loop.close()


async def _end_others() -> None:
    """Cancel whatever still runs on this loop, and wait for its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
