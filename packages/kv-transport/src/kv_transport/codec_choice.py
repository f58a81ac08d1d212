"""Which codec a transfer takes: measured rates of the link and of the codecs, and what both sides accept. Pure.

The link works beside the processors, so it is a stage of its own. What the processors do at one end is one stage: the
threads that encode also send, and those that receive also decode, so these times add, and are shared by as many
threads as there are, at most one a core. Where these limit, that is a promise, for nobody knows what else the cores
do; what the codec then did end to end goes before it. Where the link limits, its rate says all.

CC1: nothing is chosen that one side does not accept, or that would be slower than raw bytes by the figures at hand.
CC2: what is lossy already is not made lossy again. CC3: every choice can say why (`explain`). CC4: a codec that did
worse than promised is not taken again on the promise alone, but is tried again after a while.
"""

import math
from collections.abc import Mapping, Sequence
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
class MovingCost:
    """What one end spends on bytes of the wire, whatever is in them.

    Attributes:
        send_rate, receive_rate: bytes that go through the socket in a second of one processor's time, checks included;
            infinite as long as nothing was measured.
        threads: how many threads share a link's work at one end, at most one a core.
    """

    send_rate: float = math.inf
    receive_rate: float = math.inf
    threads: int = 1


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec to use, and how every candidate would have done.

    Attributes:
        rates: candidate -> KV bytes a second end to end.
        limits: candidate -> what limits it: `encode and send`, `link`, `receive and decode`, or `measured` where it is
            what the codec did.
    """

    codec: Codec
    link_rate: float
    rates: dict[Codec, float]
    limits: dict[Codec, str]

    def explain(self) -> str:
        """Why, in one line for an operator."""
        rivals = ", ".join(
            f"{codec.value} {rate / 1e9:.2f} GB/s ({self._bound(codec)})"
            for codec, rate in sorted(self.rates.items(), key=lambda item: -item[1])
        )
        return f"{self.codec.value} over a link of {self.link_rate / 1e9:.2f} GB/s: {rivals}"

    def _bound(self, codec: Codec) -> str:
        limit = self.limits[codec]
        return limit if limit == "measured" else f"limited by {limit}"


GAIN_MIN: Final = 1.1
"""A codec must promise this much more than raw bytes: figures are estimates, and raw bytes cost no processor."""


def choose_codec(
    link_rate: float,
    costs: Sequence[CodecCost],
    allowed: Sequence[Codec],
    moving: MovingCost,
    achieved: Mapping[Codec, float],
) -> CodecChoice:
    """The codec that moves most KV a second. Stages overlap, so each codec is as fast as its slowest stage.

    A lossy codec is chosen only when the link is what limits raw bytes, as for every codec, and when it is allowed.

    Args:
        link_rate: bytes a second that the link was measured to carry, above 0.
        costs: measured codecs; raw bytes need none.
        allowed: what both sides accept.
        achieved: KV bytes a second that a codec was measured to move over this link, of late.
    """
    rates, bounds = {Codec.NONE: link_rate}, {Codec.NONE: "link"}
    for cost in costs:
        if cost.codec not in allowed or cost.codec is Codec.NONE:
            continue
        stages = {
            "encode and send": moving.threads / (1 / cost.encode_rate + cost.ratio / moving.send_rate),
            "link": link_rate / cost.ratio,
            "receive and decode": moving.threads / (cost.ratio / moving.receive_rate + 1 / cost.decode_rate),
        }
        slowest = min(stages, key=lambda name: stages[name])
        # What LZ4 leaves is a matter of the data at hand, so what it did with other data says nothing.
        if slowest != "link" and cost.codec in achieved and not cost.codec.lossless:
            rates[cost.codec], bounds[cost.codec] = achieved[cost.codec], "measured"
        else:
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


class MovingMeter:
    """What one thread spends on sending and receiving. That thread tells it; any may ask."""

    def __init__(self) -> None:
        self._sent: DecayedRate | None = None
        self._received: DecayedRate | None = None

    def sent(self, nbytes: int, cpu_ns: int) -> None:
        """So many bytes went out, and took so much of the thread's time."""
        self._sent = self._sent or DecayedRate()
        self._sent.add(nbytes, cpu_ns)

    def received(self, nbytes: int, cpu_ns: int) -> None:
        """So many bytes came in, and took so much of the thread's time."""
        self._received = self._received or DecayedRate()
        self._received.add(nbytes, cpu_ns)

    def cost(self, threads: int) -> MovingCost:
        """Either end's, with so many threads for a link: the peer is taken to be as fast as we are."""
        sent, received = self._sent, self._received
        known = sent or received
        if known is None:
            return MovingCost(threads=threads)
        return MovingCost((sent or known).rate, (received or known).rate, threads)


class LinkMeter:
    """Bytes of KV a second that a link carries while it has work, by the codec that they went through.

    The rate of the link itself is learnt from raw units only: with a codec at work it may be the codec, at either end,
    that one waits for, and nothing tells it from the link. So it is measured again, by raw units, after some encoded
    ones (`stale`); and what a codec did is forgotten after many units without it, for the machine may have had other
    work then. A sample is of one codec alone.
    """

    _SAMPLE_NS: Final = 5_000_000
    _SAMPLE_BYTES: Final = 256 * 1024
    _STALE_UNITS: Final = 128
    _FORGET_UNITS: Final = 512

    def __init__(self) -> None:
        self._rates: dict[Codec, DecayedRate] = {}
        self._units_without: dict[Codec, int] = {}
        self._in_flight: dict[Codec, int] = {}
        self._sampled = Codec.NONE
        self._since_ns = self._busy_ns = self._nbytes = 0

    @property
    def rate(self) -> float | None:
        """Of raw bytes; None until it was measured."""
        raw = self._rates.get(Codec.NONE)
        return None if raw is None else raw.rate

    @property
    def achieved(self) -> dict[Codec, float]:
        """Of what went through a codec, where that was measured of late."""
        return {codec: rate.rate for codec, rate in self._rates.items() if codec is not Codec.NONE}

    @property
    def stale(self) -> bool:
        """Many units were encoded since it was measured."""
        return self._units_without.get(Codec.NONE, 0) >= self._STALE_UNITS

    def posted(self, now_ns: int, codec: Codec = Codec.NONE) -> None:
        """A unit is on its way."""
        if not self._in_flight:
            self._since_ns = now_ns
        self._in_flight[codec] = self._in_flight.get(codec, 0) + 1

    def settled(self, nbytes: int, now_ns: int, codec: Codec = Codec.NONE) -> None:
        """A unit is over.

        Args:
            nbytes: of KV; 0 for a unit that failed.
            codec: as it was posted.
        """
        mixed = len(self._in_flight) > 1
        self._in_flight[codec] -= 1
        if not self._in_flight[codec]:
            del self._in_flight[codec]
        self._age(codec)
        busy_ns, self._since_ns = now_ns - self._since_ns, now_ns
        if mixed or codec is not self._sampled:
            self._busy_ns = self._nbytes = 0
            self._sampled = codec
        if mixed:
            return
        self._busy_ns += busy_ns
        self._nbytes += nbytes
        if self._busy_ns < self._SAMPLE_NS or self._nbytes < self._SAMPLE_BYTES:
            return
        self._rates.setdefault(codec, DecayedRate()).add(self._nbytes, self._busy_ns)
        self._busy_ns = self._nbytes = self._units_without[codec] = 0

    def _age(self, used: Codec) -> None:
        for codec in list(self._rates):
            if codec is used:
                continue
            self._units_without[codec] = self._units_without.get(codec, 0) + 1
            if codec is not Codec.NONE and self._units_without[codec] >= self._FORGET_UNITS:
                del self._rates[codec], self._units_without[codec]


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
        meter: LinkMeter,
        costs: Sequence[CodecCost],
        moving: MovingCost = MovingCost(),
    ) -> Codec:
        """For the next unit.

        Args:
            encodes: whether that transport writes anything but raw bytes.
            meter: of that transport.
            costs: of the codecs measured so far.
            moving: what its threads spend on the bytes themselves.
        """
        if not encodes:
            return self._chose(Codec.NONE, f"none: {scheme} moves bytes as they are")
        if self.wanted is not None:
            return self._chose(self.wanted, f"{self.wanted.value}: it was asked for")
        if self._prefer_lz4 and Codec.LZ4 in self._accepted:
            return self._chose(Codec.LZ4, f"lz4: another link broke, and {scheme} stands in for it")
        if not self._accepted:
            return self._chose(Codec.NONE, "none: nothing else is accepted")
        if meter.rate is None:
            return self._chose(Codec.NONE, f"none: the rate of {scheme} is not known yet")
        if meter.stale:
            return self._chose(Codec.NONE, f"none: the rate of {scheme} is being measured again")
        choice = choose_codec(meter.rate, costs, self._accepted, moving, meter.achieved)
        return self._chose(choice.codec, choice.explain())

    def explain(self) -> str:
        """The latest choice and its reason, for an operator."""
        return self._why

    def _chose(self, codec: Codec, why: str) -> Codec:
        self._why = why
        return codec
