"""The sender's side of a hand-over that is fed layer by layer while prefill still computes."""

from collections.abc import Sequence

from kv_core.block import BlockRef
from kv_transport.types import TransferStats


class Handover:
    """Made by `KVCacheTransferEngine.open_handover`."""

    def submit(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None:
        """Send `blocks` of one layer to the grant's positions `[start, start + len(blocks))`; on the loop.

        They must be complete and stay unchanged until `finish` is over. Cells that are not sealed yet are sealed by
        the transport's own threads first. Raises what the hand-over failed with, if it did.
        """
        raise NotImplementedError

    def submit_threadsafe(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None:
        """The same from an engine's compute thread: seals the cells there (about 10 GB/s), hands over, returns."""
        raise NotImplementedError

    async def finish(self, timeout_ms: int | None = None) -> TransferStats:
        """Nothing more will be submitted: wait until the receiver has verified everything the grant covers.

        When it returns or raises, the transport has stopped reading the blocks.

        Raises:
            TransferTimeout: not within `timeout_ms`; the hand-over was given up.
            LocalProtocolError: pieces of the grant were never submitted.
            TransportError: why it failed.
        """
        raise NotImplementedError

    async def cancel(self) -> None:
        """Give it up and wait until the blocks are no longer read. The receiver is told. Idempotent."""
