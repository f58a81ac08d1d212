"""Which codec a transfer takes: measured rates of the link and of the codecs, and what both sides accept. Pure.

CC1: nothing is chosen that one side does not accept, or that would be slower than raw bytes by the figures at hand.
CC2: what is lossy already is not made lossy again. CC3: every choice can say why (`explain`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.namespace import EXACT, Fidelity
from kv_transport.codecs import Codec


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec was measured to do on this machine and this kind of data.

    Attributes:
        ratio: bytes on the wire for each byte of KV.
        encode_rate, decode_rate: bytes of KV a second, at both ends.
    """

    codec: Codec
    ratio: float
    encode_rate: float
    decode_rate: float


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec to use, and how every candidate would have done.

    Attributes:
        rates: candidate -> KV bytes a second end to end.
        limits: candidate -> what limits it: `encode`, `link` or `decode`.
    """

    codec: Codec
    link_rate: float
    rates: dict[Codec, float]
    limits: dict[Codec, str]

    def explain(self) -> str:
        """Why, in one line for an operator."""
        rivals = ", ".join(
            f"{codec.value} {rate / 1e9:.2f} GB/s (limited by {self.limits[codec]})"
            for codec, rate in sorted(self.rates.items(), key=lambda item: -item[1])
        )
        return f"{self.codec.value} over a link of {self.link_rate / 1e9:.2f} GB/s: {rivals}"


GAIN_MIN: Final = 1.1
"""A codec must promise this much more than raw bytes: figures are estimates, and raw bytes cost no processor."""


def choose_codec(link_rate: float, costs: Sequence[CodecCost], allowed: Sequence[Codec]) -> CodecChoice:
    """The codec that moves most KV a second. The stages overlap, so each is as fast as its slowest stage.

    A lossy codec is chosen only when the link is what limits raw bytes, as for every codec, and when it is allowed.

    Args:
        link_rate: bytes a second that the link was measured to carry, above 0.
        costs: measured codecs; raw bytes need none.
        allowed: what both sides accept.
    """
    rates, bounds = {Codec.NONE: link_rate}, {Codec.NONE: "link"}
    for cost in costs:
        if cost.codec in allowed and cost.codec is not Codec.NONE:
            stages = {"encode": cost.encode_rate, "link": link_rate / cost.ratio, "decode": cost.decode_rate}
            slowest = min(stages, key=lambda name: stages[name])
            rates[cost.codec], bounds[cost.codec] = stages[slowest], slowest
    best = max(rates, key=lambda codec: (rates[codec], codec.lossless))
    if rates[best] < GAIN_MIN * link_rate:
        best = Codec.NONE
    return CodecChoice(best, link_rate, rates, bounds)


class DecayedRate:
    """Bytes a second over the recent past: sums that fade, so that a short burst after a stall weighs by its length."""

    _KEEP: Final = 0.7

    def __init__(self) -> None:
        self._nbytes = self._ns = 0.0

    @property
    def rate(self) -> float:
        """Raises ZeroDivisionError before the first sample."""
        return self._nbytes * 1e9 / self._ns

    def add(self, nbytes: int, ns: int) -> float:
        """One more sample; the rate with it."""
        self._nbytes = self._KEEP * self._nbytes + nbytes
        self._ns = self._KEEP * self._ns + max(1, ns)
        return self.rate


class LinkMeter:
    """Bytes a second that a link carries while it has work, learnt from raw units only.

    With a codec at work it may be the codec, at either end, that one waits for, and nothing tells it from the link. So
    the rate is measured again, by raw units, after some encoded ones (`stale`).
    """

    _SAMPLE_NS: Final = 5_000_000
    _SAMPLE_BYTES: Final = 256 * 1024
    _STALE_UNITS: Final = 128

    def __init__(self) -> None:
        self.rate: float | None = None
        """None until it was measured."""
        self._in_flight = self._encoded_in_flight = 0
        self._encoded = 0
        self._decayed = DecayedRate()
        self._since_ns = self._busy_ns = self._nbytes = 0

    @property
    def stale(self) -> bool:
        """Many units were encoded since it was measured."""
        return self._encoded >= self._STALE_UNITS

    def posted(self, now_ns: int, *, encoded: bool = False) -> None:
        """A unit is on its way."""
        if not self._in_flight:
            self._since_ns = now_ns
        self._in_flight += 1
        self._encoded_in_flight += encoded

    def settled(self, nbytes: int, now_ns: int, *, encoded: bool = False) -> None:
        """A unit is over; `nbytes` is 0 for one that failed. `encoded` as it was posted."""
        mixed = self._encoded_in_flight > 0
        self._in_flight -= 1
        self._encoded_in_flight -= encoded
        self._encoded += encoded
        busy_ns, self._since_ns = now_ns - self._since_ns, now_ns
        if mixed:
            self._busy_ns = self._nbytes = 0
            return
        self._busy_ns += busy_ns
        self._nbytes += nbytes
        if self._busy_ns < self._SAMPLE_NS or self._nbytes < self._SAMPLE_BYTES:
            return
        self.rate = self._decayed.add(self._nbytes, self._busy_ns)
        self._busy_ns = self._nbytes = self._encoded = 0


class CodecPolicy:
    """The choices of one transfer, unit by unit, as figures become known.

    Args:
        accepted: what the other side accepts; raw bytes always.
        wanted: take this one wherever the link encodes at all; None leaves it to the figures.
        fidelity: of the source; what is not exact is sent without loss.
    """

    def __init__(self, accepted: Sequence[Codec], wanted: Codec | None = None, fidelity: Fidelity = EXACT) -> None:
        self.fidelity: Final = fidelity
        self.wanted: Final = wanted
        self.lz4_ratio: float | None = None
        """Bytes that LZ4 leaves of one byte of this transfer, where it was tried; at most 1, since units can go raw."""
        self._accepted = [codec for codec in accepted if codec.on_wire and (codec.lossless or fidelity.is_exact)]
        self._prefer_lz4 = False
        self._why = "nothing was sent yet"

    def allows(self, codec: Codec) -> bool:
        return codec is Codec.NONE or codec in self._accepted

    def fall_back(self, *, lz4: bool) -> None:
        """The transfer lost its link and goes on over another one."""
        self._prefer_lz4 = lz4

    def note_lz4(self, ratio: float) -> None:
        """What LZ4 made of a unit of this transfer."""
        ratio = min(ratio, 1.0)
        self.lz4_ratio = ratio if self.lz4_ratio is None else 0.7 * self.lz4_ratio + 0.3 * ratio

    def pick(
        self,
        scheme: str,
        encodes: bool,
        link_rate: float | None,
        costs: Sequence[CodecCost],
        *,
        stale: bool = False,
    ) -> Codec:
        """For the next unit.

        Args:
            encodes: whether that transport writes anything but raw bytes.
            link_rate: measured, None when it is not known yet.
            stale: it was measured long ago.
            costs: of the codecs measured so far.
        """
        if not encodes:
            return self._chose(Codec.NONE, f"none: {scheme} moves bytes as they are")
        if self.wanted is not None:
            return self._chose(self.wanted, f"{self.wanted.value}: it was asked for")
        if self._prefer_lz4 and Codec.LZ4 in self._accepted:
            return self._chose(Codec.LZ4, f"lz4: another link broke, and {scheme} stands in for it")
        if not self._accepted:
            return self._chose(Codec.NONE, "none: nothing else is accepted")
        if link_rate is None:
            return self._chose(Codec.NONE, f"none: the rate of {scheme} is not known yet")
        if stale:
            return self._chose(Codec.NONE, f"none: the rate of {scheme} is being measured again")
        choice = choose_codec(link_rate, costs, self._accepted)
        return self._chose(choice.codec, choice.explain())

    def explain(self) -> str:
        """The latest choice and its reason, for an operator."""
        return self._why

    def _chose(self, codec: Codec, why: str) -> Codec:
        self._why = why
        return codec
