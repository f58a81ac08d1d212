"""The client for code without an event loop: the same calls, each of which blocks until it is done or its deadline."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kv_client.blocks import PrefixBlocks
from kv_client.client import Client
from kv_client.config import ClientConfig
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

    def start(self) -> None:
        """As `Client.start`."""
        self._thread.start()
        try:
            self._run(self._client.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """As `Client.close`."""
        if self._thread.is_alive():
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
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
