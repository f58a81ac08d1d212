"""The receiver's side of a hand-over."""

from kv_transport.types import TransferStats


class LayerArrival:
    """Which layers are verified to be in the arena; any thread may ask."""

    def layer_ready(self, layer: int) -> bool:
        """Whether that layer is complete; once true it stays true. Raises what the hand-over failed with."""
        raise NotImplementedError


class Inbound:
    """Made by `KVCacheTransferEngine.expect`."""

    @property
    def arrival(self) -> LayerArrival:
        """The view for a compute thread."""
        raise NotImplementedError

    async def layer_ready(self, layer: int) -> None:
        """Until that layer is complete and verified. Raises what the hand-over failed with, as soon as it does."""

    def wait_layer(self, layer: int, timeout_ms: int | None = None) -> None:
        """`layer_ready` for a compute thread: blocks. Raises `TransferTimeout` after `timeout_ms`."""

    async def done(self) -> TransferStats:
        """Until every layer is verified. Raises what the hand-over failed with."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give it up: the grant ends, a writer at work is fenced off. Idempotent."""

    async def released(self) -> None:
        """Until no peer can write into the slots any more: by completion, or by a fence. Slots may be reused only then.

        It may take as long as a stopped peer lives; meanwhile the slots are listed as in quarantine.
        """
