"""Who has seen what: origins, dots, version vectors, causal tokens.

An *origin* is one life of one node (node, incarnation), the only writer of its own sequence of updates. A *dot* is one
of them. A *version vector* says, for each origin, that its updates 1..n are meant; two of them compare as before,
after, equal or concurrent. A *causal token* is a small set of dots that a read must follow.

V1: `merge` is the least upper bound, `meet` the greatest lower bound. V2: `a` is before `b` exactly when every dot of
`a` is in `b` and not the other way round. V3: `base.updated(delta) == vector` for `delta = vector.delta(base)`.
V4: a token names each origin once, in order, and at most `MAX_TOKEN_DOTS` of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Annotated

import msgspec

from kv_consistency import limits
from kv_consistency.errors import InvalidUpdateError, MalformedUpdateError, TokenTooLargeError
from kv_core import limits as core_limits
from kv_core.ids import Incarnation, NodeId


class Origin(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False, cache_hash=True):
    """One life of one node."""

    node: Annotated[NodeId, msgspec.Meta(min_length=1, max_length=core_limits.MAX_NAME_BYTES)]
    incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=core_limits.MAX_INT64)]

    def __str__(self) -> str:
        return f"{self.node}/{self.incarnation}"


class Dot(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The n-th update of an origin, from 1; it stands for those before it as well."""

    origin: Origin
    n: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_DOT)]

    def __str__(self) -> str:
        return f"{self.origin}:{self.n}"


class Comparison(Enum):
    """How one version vector stands to another."""

    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


class Reach(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """How far something is in one origin; 0: it has nothing of it."""

    origin: Origin
    n: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_DOT)]


Seen = Annotated[tuple[Reach, ...], msgspec.Meta(max_length=2 * limits.MAX_ORIGINS)]
"""A version vector on the wire, or the difference between two, in order of origins."""


class VersionVector:
    """For each origin the number of its updates that are covered; an origin that is not named has none. Immutable."""

    __slots__ = ("_order", "_seen")

    def __init__(self, seen: Mapping[Origin, int] | None = None) -> None:
        self._seen: dict[Origin, int] = {origin: n for origin, n in (seen or {}).items() if n > 0}
        self._order: tuple[Origin, ...] | None = None

    @classmethod
    def of(cls, dots: Iterable[Dot | Reach]) -> "VersionVector":
        """The least vector that covers `dots`; also the way back from `to_wire`."""
        seen: dict[Origin, int] = {}
        for dot in dots:
            if dot.n > seen.get(dot.origin, 0):
                seen[dot.origin] = dot.n
        return cls(seen)

    def __getitem__(self, origin: Origin) -> int:
        return self._seen.get(origin, 0)

    def __iter__(self) -> Iterator[Origin]:
        if self._order is None:
            self._order = tuple(sorted(self._seen))
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._seen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionVector) and self._seen == other._seen

    def __hash__(self) -> int:
        return hash(frozenset(self._seen.items()))

    def __repr__(self) -> str:
        return f"VersionVector({', '.join(f'{reach.origin}:{reach.n}' for reach in self.to_wire())})"

    def covers(self, dot: Dot) -> bool:
        """Whether `dot` is among those meant."""
        return self._seen.get(dot.origin, 0) >= dot.n

    def dominates(self, other: "VersionVector") -> bool:
        """Whether everything `other` covers is covered."""
        mine = self._seen
        return all(mine.get(origin, 0) >= n for origin, n in other._seen.items())

    def compare(self, other: "VersionVector") -> Comparison:
        """Before, after, equal or concurrent."""
        above, below = self.dominates(other), other.dominates(self)
        if above:
            return Comparison.EQUAL if below else Comparison.AFTER
        return Comparison.BEFORE if below else Comparison.CONCURRENT

    def merge(self, other: "VersionVector") -> "VersionVector":
        """The least vector that covers both."""
        seen = dict(self._seen)
        for origin, n in other._seen.items():
            if n > seen.get(origin, 0):
                seen[origin] = n
        return VersionVector(seen)

    def meet(self, other: "VersionVector") -> "VersionVector":
        """What both cover."""
        theirs = other._seen
        return VersionVector({origin: min(n, theirs.get(origin, 0)) for origin, n in self._seen.items()})

    def advanced(self, dot: Dot) -> "VersionVector":
        """With `dot`, and so all before it of its origin, covered."""
        return self if self.covers(dot) else VersionVector({**self._seen, dot.origin: dot.n})

    def delta(self, base: "VersionVector") -> Seen:
        """What must be told to one who takes us for `base`: the origins in which we are further or less far."""
        old, mine = base._seen, self._seen
        changed = [Reach(origin, n) for origin, n in mine.items() if n != old.get(origin, 0)]
        changed += [Reach(origin, 0) for origin in old if origin not in mine]
        return tuple(sorted(changed))

    def updated(self, delta: Seen) -> "VersionVector":
        """The vector of which `delta` was made against this one."""
        return VersionVector({**self._seen, **{reach.origin: reach.n for reach in delta}})

    def to_wire(self) -> Seen:
        """How far it is in each origin, in order of origins."""
        return tuple(Reach(origin, n) for origin, n in sorted(self._seen.items()))


class CausalToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a read must follow: at most one dot for each origin, in order. The empty token follows nothing."""

    dots: Annotated[tuple[Dot, ...], msgspec.Meta(max_length=limits.MAX_TOKEN_DOTS)] = ()

    def __post_init__(self) -> None:
        if any(a.origin >= b.origin for a, b in zip(self.dots, self.dots[1:], strict=False)):
            raise ValueError("the dots of a token are in order, one for each origin")

    @classmethod
    def of(cls, dots: Iterable[Dot]) -> "CausalToken":
        """The token that follows all of `dots`.

        Raises:
            TokenTooLargeError: more origins than a token may name.
        """
        seen = tuple(Dot(reach.origin, reach.n) for reach in VersionVector.of(dots).to_wire())
        if len(seen) > limits.MAX_TOKEN_DOTS:
            raise TokenTooLargeError(have=len(seen), limit=limits.MAX_TOKEN_DOTS)
        return cls(seen)

    def join(self, *others: "CausalToken") -> "CausalToken":
        """The token that follows what any of them follows.

        Raises:
            TokenTooLargeError: more origins than a token may name.
        """
        return CausalToken.of(dot for token in (self, *others) for dot in token.dots)

    def to_bytes(self) -> bytes:
        """The token as an opaque field of somebody else's message; empty for the empty token."""
        return _ENCODE(self) if self.dots else b""

    @classmethod
    def from_bytes(cls, data: bytes, peer: str = "") -> "CausalToken":
        """The way back; `peer` is named in the error.

        Raises:
            MalformedUpdateError: these bytes are no token.
        """
        if not data:
            return cls()
        if len(data) > limits.MAX_TOKEN_BYTES:
            raise MalformedUpdateError(what="causal token", peer=peer, reason=f"{len(data)} bytes")
        try:
            return _DECODE(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise MalformedUpdateError(what="causal token", peer=peer, reason=str(error)) from None

    def __bool__(self) -> bool:
        return bool(self.dots)

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.dots)) + "}"


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(CausalToken).decode


def next_incarnation(persisted: int, seen_by_peers: Iterable[int] = ()) -> Incarnation:
    """The incarnation of a new life: above what the node persisted and what any peer has seen.

    Raises:
        InvalidUpdateError: a negative incarnation.
    """
    seen = [persisted, *seen_by_peers]
    if min(seen) < 0:
        raise InvalidUpdateError(what="incarnation", reason=f"{min(seen)} is negative")
    return Incarnation(max(seen) + 1)
