"""What a tier's owner asks of the medium, whichever it is. Calls block; none runs on an event loop."""

from collections.abc import Sequence
from typing import Protocol

from kv_prefix.tiers.blocks import PlacedBlock

Cells = Sequence[memoryview]
"""The bytes of one block, one writable buffer per layer."""


class TierStore(Protocol):
    """A medium with numbered places.

    `write`, `forget` and `clear` are called from one thread; `read` from any, never for a place that is being written.
    """

    @property
    def num_places(self) -> int:
        """Blocks that it may hold."""
        ...

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        """Revoke `forget`, then store; returns when everything would be found after a restart.

        Raises:
            TierFullError, TierIOError: none of `items` is stored; `forget` may be revoked.
        """
        ...

    def forget(self, places: Sequence[int]) -> None:
        """Revoke places: no restart finds them.

        Raises:
            TierFullError, TierIOError: some may still be found.
        """
        ...

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        """Fill the buffers; per block, whether all bytes came and are those that were sealed. Never raises."""
        ...

    def clear(self) -> None:
        """Revoke everything and give the room back.

        Raises:
            TierIOError: some may still be found.
        """
        ...

    def used_bytes(self) -> int:
        """Bytes that it takes now."""
        ...

    def close(self) -> None:
        """Give it up. Idempotent."""
        ...
