"""`PrefixBlocks`: the blocks of one prefix while they arrive, and afterwards, until they are released."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kv_client.errors import AlreadyReleased, DeadlineExceeded, InvalidRead, LayerNotReady, translate
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_transport import Arena, TransferFuture, TransferStats
from kv_transport.arena import StoredArray

T = TypeVar("T")


class PrefixBlocks:
    """One prefix in the client's arena, made by `Client.get_blocks`; leaving it as a context releases it."""

    def __init__(
        self,
        *,
        holder: str,
        lease_id: int,
        lease_ns: int,
        future: TransferFuture,
        arena: Arena,
        run: range,
        deadline_ns: int,
        clock: Clock,
        on_release: Callable[["PrefixBlocks"], None],
    ) -> None:
        self.lease_id = lease_id
        self.lease_ns = lease_ns
        self.renewed_ns = clock.monotonic_ns()
        self.run = run
        self._holder = holder
        self._future = future
        self._arena = arena
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._on_release = on_release
        self._released = False

    @property
    def num_blocks(self) -> int:
        return len(self.run)

    async def layer_ready(self, layer: int) -> None:
        """Return when that layer of every block is verified here; shallow layers come first.

        Raises:
            HolderLost, CheckFailed, LeaseLost: the read failed.
            DeadlineExceeded: not by the deadline of `get_blocks`; release the blocks.
            AlreadyReleased: the blocks were given back.
        """
        self._check(layer)
        await self._by_deadline(self._future.layer_ready(layer))

    async def wait(self) -> TransferStats:
        """Return when every layer is verified here, with the figures of the transfer; raises as `layer_ready`."""
        self._require_held()
        return await self._by_deadline(self._future.wait())

    def array(self, layer: int) -> StoredArray:
        """That layer, read-only and not copied: `(num_blocks, planes, num_kv_heads, block_size, head_dim)`.

        bf16 appears as uint16, fp8 as uint8. The memory is another prefix's after `release`: copy what outlives it.

        Raises:
            LayerNotReady: `layer_ready` has not returned for it.
            AlreadyReleased: the blocks were given back.
        """
        self._check(layer)
        if layer in self._future.missing_layers:
            raise LayerNotReady(layer=layer)
        view: StoredArray = self._arena.kv(layer)[self.run.start : self.run.stop]
        view.flags.writeable = False
        return view

    def release(self) -> None:
        """Stop reading, end the lease at the holder, and give the slots back when nothing writes them. Idempotent."""
        if not self._released:
            self._released = True
            self._future.cancel()
            self._on_release(self)

    def __enter__(self) -> "PrefixBlocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def at_rest(self) -> None:
        """Return when the transfer is over, however it ended, and no memory of it is in use."""
        try:
            await self._future.wait()
        except KVError:
            # Whoever waited for the blocks got it.
            return

    async def _by_deadline(self, work: Awaitable[T]) -> T:
        left_ns = self._deadline_ns - self._clock.monotonic_ns()
        try:
            async with asyncio.timeout(max(0, left_ns) / 1e9):
                return await work
        except TimeoutError:
            missing = self._future.missing_layers
            raise DeadlineExceeded(holder=self._holder, cause=f"layers {missing} are missing") from None
        except KVError as error:
            raise translate(error, self._holder) from error

    def _check(self, layer: int) -> None:
        self._require_held()
        num_layers = self._arena.geometry.num_layers
        if not 0 <= layer < num_layers:
            raise InvalidRead(name="layer", value=layer, rule=f"0 to {num_layers - 1}")

    def _require_held(self) -> None:
        if self._released:
            raise AlreadyReleased(what="this prefix")
