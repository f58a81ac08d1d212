"""`TransferFuture`: a transfer as its caller sees it."""

from kv_core.namespace import Fidelity
from kv_transport.errors import TransferCancelled
from kv_transport.flow import Flow
from kv_transport.types import TransferStats, XferState


class TransferFuture:
    """One transfer in progress. Waiting for it with a timeout does not cancel it."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    @property
    def total_bytes(self) -> int:
        """KV bytes that it moves when complete."""
        return self._flow.total_bytes

    @property
    def state(self) -> XferState:
        return self._flow.state

    @property
    def missing_layers(self) -> list[int]:
        """Layers not yet verified at the destination."""
        return self._flow.missing_layers

    @property
    def fidelity(self) -> Fidelity:
        """Of what arrives, so far: publish it under no other."""
        return self._flow.fidelity

    def explain(self) -> str:
        """Which codec was chosen last, and why: a line for an operator."""
        return self._flow.policy.explain()

    def stats(self) -> TransferStats:
        """The figures so far."""
        return self._flow.stats()

    async def wait(self, timeout_ms: int | None = None) -> TransferStats:
        """Until every byte is verified at the destination and no memory is in use any more.

        Raises:
            TransferTimeout: not within `timeout_ms`; the error names the missing layers, the transfer goes on.
            TransportError: it failed; its memory is free.
        """
        return await self._flow.wait(timeout_ms)

    async def layer_ready(self, layer: int) -> None:
        """Until that layer is verified at the destination. Raises what the transfer failed with."""
        await self._flow.layer_ready(layer)

    def cancel(self) -> None:
        """Give it up; `wait` raises `TransferCancelled` when its memory is free. Idempotent, no-op when over."""
        if not self._flow.over:
            self._flow.stop(TransferCancelled(request=self._flow.name))
