"""How far a grant is filled: which positions of which layer are verified, and which are just being written. Pure.

Positions are bits of one integer per layer. P1: a position never goes back from verified. P2: a position that is
verified or being written is never given to another writer: a repeated unit lands only where nothing is yet.
"""

from kv_transport.errors import GrantRefused


def span_mask(start: int, end: int) -> int:
    """Bits `[start, end)`."""
    return (1 << end) - (1 << start)


class GrantProgress:
    """The layers `[layer_start, layer_end)` of `num_positions` blocks."""

    __slots__ = ("_full", "_landing", "_layer_start", "_verified", "layers_left")

    def __init__(self, layer_start: int, layer_end: int, num_positions: int) -> None:
        self._layer_start = layer_start
        self._full = span_mask(0, num_positions)
        self._verified = [0] * (layer_end - layer_start)
        self._landing = [0] * (layer_end - layer_start)
        self.layers_left = layer_end - layer_start

    @property
    def complete(self) -> bool:
        return self.layers_left == 0

    def verified(self) -> list[int]:
        """The bits per layer."""
        return list(self._verified)

    def missing_layers(self) -> list[int]:
        return [self._layer_start + index for index, bits in enumerate(self._verified) if bits != self._full]

    def begin(self, layer: int, start: int, end: int) -> int:
        """A unit is about to land; the bits of the positions that it may write.

        Raises:
            GrantRefused: outside the grant, or another unit is being written there.
        """
        index = layer - self._layer_start
        inside = 0 <= start < end <= self._full.bit_length() and 0 <= index < len(self._verified)
        if not inside:
            raise GrantRefused(ticket=0, reason=f"layer {layer}, positions [{start}, {end}) lie outside")
        span = span_mask(start, end)
        if self._landing[index] & span:
            raise GrantRefused(ticket=0, reason=f"layer {layer}, positions [{start}, {end}) are being written")
        fresh = span & ~self._verified[index]
        self._landing[index] |= fresh
        return fresh

    def land(self, layer: int, fresh: int) -> bool:
        """The bytes of these positions are verified; whether that completed the layer."""
        index = layer - self._layer_start
        self._landing[index] &= ~fresh
        before = self._verified[index]
        self._verified[index] = before | fresh
        if before != self._full and self._verified[index] == self._full:
            self.layers_left -= 1
            return True
        return False

    def abort(self, layer: int, fresh: int) -> None:
        """The unit did not make it; its positions may be tried again."""
        self._landing[layer - self._layer_start] &= ~fresh
