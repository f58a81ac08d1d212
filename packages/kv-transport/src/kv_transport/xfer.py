"""Prepared descriptor lists and the transfers made of them."""

from kv_transport.types import TransferStats, XferState


class XferDlist:
    """Checked pieces of one side's memory. Made by `TransferAgent.prep_xfer_dlist`."""

    def __len__(self) -> int:
        raise NotImplementedError


class Xfer:
    """A transfer handle. Release it, or use it as `async with`; one in flight cannot be released."""

    @property
    def state(self) -> XferState:
        raise NotImplementedError

    async def done(self, timeout_ms: int | None = None) -> TransferStats:
        """Until every byte is verified at its destination.

        Raises:
            TransferTimeout: not within `timeout_ms`. The transfer goes on; its memory stays in use.
            TransportError: it failed and its memory is free.
        """
        raise NotImplementedError

    def release(self) -> None:
        """End the handle. Raises `XferActive` while it is posted or abandoned. Idempotent."""
