"""`TransferFuture`: a transfer as its caller sees it."""

from kv_transport.types import TransferStats, XferState


class TransferFuture:
    """One transfer in progress. Waiting for it with a timeout does not cancel it."""

    @property
    def total_bytes(self) -> int:
        """KV bytes that it moves when complete."""
        raise NotImplementedError

    @property
    def state(self) -> XferState:
        raise NotImplementedError

    @property
    def missing_layers(self) -> list[int]:
        """Layers not yet verified at the destination."""
        raise NotImplementedError

    async def wait(self, timeout_ms: int | None = None) -> TransferStats:
        """Until every byte is verified at the destination and no memory is in use any more.

        Raises:
            TransferTimeout: not within `timeout_ms`; the error names the missing layers, the transfer goes on.
            TransportError: it failed; its memory is free.
        """
        raise NotImplementedError

    async def layer_ready(self, layer: int) -> None:
        """Until that layer is verified at the destination. Raises what the transfer failed with."""

    def cancel(self) -> None:
        """Give it up; `wait` raises `TransferCancelled` when its memory is free. Idempotent, no-op when over."""
