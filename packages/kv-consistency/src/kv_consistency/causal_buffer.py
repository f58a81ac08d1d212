"""When an update may be applied: after its predecessor and after everything it depends on.

Decides the order of application and nothing else; it does not look into updates. What cannot be applied yet is parked
under its dot; the head of an origin's queue waits for one foreign dot at a time, the first that is missing, and is
woken by it. Above the bound nothing more is parked; what is dropped there is a gap like any other, and is fetched
again.

B1: what was handed out is closed under "depends on" and under each origin's order. B2: every update is handed out at
most once. B3: parked updates stay within `parked_max` and `bytes_max`. B4: an origin that is frozen hands out nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kv_consistency import limits
from kv_consistency.update import Update, estimated_nbytes
from kv_consistency.version_vector import Dot, Origin, VersionVector
from kv_core.ids import Incarnation, NodeId

Delivery = tuple[Origin, Sequence[Update]]
"""Consecutive updates of one origin to be applied now, in this order."""


class _Parked(msgspec.Struct, gc=False):
    """An update that waits, and what it counts for."""

    update: Update
    nbytes: int


class CausalBuffer:
    """How far each origin is applied, and what waits."""

    __slots__ = (
        "_applied",
        "_blocked",
        "_bytes_max",
        "_floors",
        "_frozen",
        "_heads",
        "_parked_max",
        "_pending",
        "_waits_for",
        "dropped",
        "duplicates",
        "parked",
        "parked_bytes",
    )

    def __init__(self, parked_max: int = limits.MAX_PARKED_UPDATES, bytes_max: int = limits.MAX_PARKED_BYTES) -> None:
        self._parked_max = parked_max
        self._bytes_max = bytes_max
        self._applied: dict[Origin, int] = {}
        self._heads: dict[Origin, int] = {}
        self._pending: dict[Origin, dict[int, _Parked]] = {}
        self._blocked: dict[Origin, list[tuple[int, Origin]]] = {}
        self._waits_for: dict[Origin, Dot] = {}
        self._frozen: dict[Origin, int] = {}
        self._floors: dict[NodeId, Incarnation] = {}
        self.parked = self.parked_bytes = self.dropped = self.duplicates = 0

    def applied(self, origin: Origin) -> int:
        """How many updates of the origin were handed out."""
        return self._applied.get(origin, 0)

    def head(self, origin: Origin) -> int:
        """The highest dot of the origin that is known to exist."""
        return max(self._heads.get(origin, 0), self._applied.get(origin, 0))

    def knows(self, origin: Origin) -> bool:
        """Whether anything of the origin is followed."""
        return origin in self._applied or origin in self._heads

    def num_origins(self) -> int:
        """How many origins are followed."""
        return len(self._applied.keys() | self._heads.keys())

    def vector(self) -> VersionVector:
        """What was handed out."""
        return VersionVector(self._applied)

    def covers(self, dot: Dot) -> bool:
        """Whether `dot` was handed out, or everybody has it."""
        return self._applied.get(dot.origin, 0) >= dot.n or self.retired(dot.origin)

    def origins(self) -> list[Origin]:
        """Every origin of which anything is known, in order."""
        return sorted(self._applied.keys() | self._heads.keys() | self._pending.keys())

    def lags(self) -> Iterator[tuple[Origin, int]]:
        """Each origin, and how many of its updates are known to exist and were not handed out."""
        heads = self._heads
        for origin, n in self._applied.items():
            yield origin, max(0, heads.get(origin, 0) - n)
        for origin, head in heads.items():
            if origin not in self._applied:
                yield origin, head

    def issue(self, origin: Origin, n: int) -> None:
        """Our own next update was applied."""
        assert n == self._applied.get(origin, 0) + 1, "own updates come in order"
        self._applied[origin] = n

    def offer(self, origin: Origin, updates: Sequence[Update]) -> list[Delivery]:
        """Take updates of one origin as they came in; returns what can be applied now, of it and of others."""
        out: list[Delivery] = []
        pending = self._pending.get(origin)
        if len(updates) == 1 and origin not in self._frozen:
            # Most messages bring one update: in order, or one that waits in a queue of its own origin.
            update, following = updates[0], self._applied.get(origin, 0) + 1
            if update.n != following:
                self._park(origin, update)
                if pending and following in pending:
                    self._drain([origin], out)
                return out
            if not pending and not update.deps:
                self._applied[origin] = following
                out.append((origin, updates))
                if self._blocked and (woken := self._woken(origin)):
                    self._drain([origin, *woken], out)
                return out
        taken = 0
        if not pending and origin not in self._frozen:
            taken = self._take_ready(origin, updates, out)
        for update in updates[taken:]:
            self._park(origin, update)
        woken = self._woken(origin) if out and self._blocked else []
        if woken or (taken < len(updates) and self._applied.get(origin, 0) + 1 in self._pending.get(origin, ())):
            self._drain([origin, *woken], out)
        return out

    def note_head(self, origin: Origin, n: int) -> None:
        """Update `n` of the origin is known to exist."""
        if n > self._heads.get(origin, 0):
            self._heads[origin] = n

    def available(self, origin: Origin) -> int:
        """The highest dot below which nothing is missing, whether handed out or parked."""
        n = self._frozen.get(origin, self._applied.get(origin, 0))
        pending = self._pending.get(origin)
        if pending:
            while n + 1 in pending:
                n += 1
        return n

    def gap(self, origin: Origin) -> tuple[int, int] | None:
        """The first run of dots that exist and are missing here, both ends included."""
        first = self.available(origin) + 1
        above = [n for n in self._pending.get(origin, ()) if n > first]
        last = min(above) - 1 if above else self.head(origin)
        return (first, last) if first <= last else None

    def behind(self) -> list[Origin]:
        """The origins that have gaps, in order."""
        applied = self._applied
        suspects = [origin for origin, n in self._heads.items() if n > applied.get(origin, 0)]
        return sorted(origin for origin in suspects if self.gap(origin))

    def waits_for(self, origin: Origin) -> Dot | None:
        """The foreign dot that the next update of the origin waits for."""
        return self._waits_for.get(origin)

    def freeze(self, origin: Origin, base: int) -> None:
        """Hand out nothing of the origin for now; updates above `base` are what will be wanted next."""
        self._frozen[origin] = base

    def thaw(self, advance: bool) -> list[Delivery]:
        """End every freeze. With `advance` each frozen origin counts as applied up to its base."""
        frozen, self._frozen = self._frozen, {}
        out: list[Delivery] = []
        for origin, base in frozen.items():
            if advance and base > self._applied.get(origin, 0):
                self._applied[origin] = base
                self._forget_parked(origin, base)
                self._unblock(origin)
        self._drain([woken for origin in frozen for woken in (origin, *self._woken(origin))], out)
        return out

    def forget_parked(self, origin: Origin) -> None:
        """Drop what is parked of an origin; what others applied of it will come again, what nobody applied will not."""
        self._forget_parked(origin, limits.MAX_DOT)
        self._unblock(origin)
        self._heads.pop(origin, None)

    def retired(self, origin: Origin) -> bool:
        """Whether this life of a node is over and everybody has all of it."""
        return origin.incarnation < self._floors.get(origin.node, 0)

    def floors(self) -> tuple[Origin, ...]:
        """For each node with retired lives, the first that is not."""
        return tuple(Origin(node, incarnation) for node, incarnation in sorted(self._floors.items()))

    def retire(self, node: NodeId, below: Incarnation) -> tuple[list[Origin], list[Delivery]]:
        """Count every life of `node` below that one as applied and follow it no longer.

        Returns:
            The origins that are gone, and what waited for them.
        """
        if below <= self._floors.get(node, 0):
            return [], []
        self._floors[node] = below
        # Also what is only waited for: of a life that is over nothing need be known any more.
        known = {*self.origins(), *self._blocked}
        gone = sorted(origin for origin in known if origin.node == node and origin.incarnation < below)
        woken: list[Origin] = []
        for origin in gone:
            self._forget_parked(origin, limits.MAX_DOT)
            self._unblock(origin)
            woken += [other for _, other in self._blocked.pop(origin, ())]
            self._pending.pop(origin, None)
            for table in (self._frozen, self._heads, self._applied):
                table.pop(origin, None)
        for other in woken:
            self._waits_for.pop(other, None)
        out: list[Delivery] = []
        self._drain(woken, out)
        return gone, out

    def check(self) -> None:
        """Assert B3 and that what is parked is really waiting."""
        assert self.parked == sum(map(len, self._pending.values())) <= self._parked_max
        assert self.parked_bytes <= self._bytes_max
        for origin, pending in self._pending.items():
            applied = self._applied.get(origin, 0)
            assert all(n > applied for n in pending)
            head = pending.get(applied + 1)
            assert head is None or origin in self._frozen or self._first_missing(origin, head.update) is not None

    def _take_ready(self, origin: Origin, updates: Sequence[Update], out: list[Delivery]) -> int:
        """Hand out the longest prefix that is in order and depends on nothing missing; returns how many were used."""
        n = self._applied.get(origin, 0)
        ready: list[Update] = []
        used = 0
        for update in updates:
            if update.n == n + 1:
                if update.deps and self._first_missing(origin, update) is not None:
                    break
                ready.append(update)
                n += 1
            elif update.n <= n:
                self.duplicates += 1
            else:
                break
            used += 1
        if ready:
            self._applied[origin] = n
            out.append((origin, ready))
        return used

    def _park(self, origin: Origin, update: Update) -> None:
        if update.n <= self._frozen.get(origin, self._applied.get(origin, 0)):
            self.duplicates += 1
            return
        pending = self._pending.setdefault(origin, {})
        if update.n in pending:
            self.duplicates += 1
            return
        if update.n > self._heads.get(origin, 0):
            self._heads[origin] = update.n
        for dot in update.deps:
            self.note_head(dot.origin, dot.n)
        nbytes = estimated_nbytes(update)
        if self.parked >= self._parked_max or self.parked_bytes + nbytes > self._bytes_max:
            # What the next in line needs must not be kept out by what comes later.
            if not self._make_room(origin, update.n, nbytes):
                self.dropped += 1
                return
        pending[update.n] = _Parked(update, nbytes)
        self.parked += 1
        self.parked_bytes += nbytes

    def _make_room(self, origin: Origin, n: int, nbytes: int) -> bool:
        """Drop the farthest parked updates of this origin to take a nearer one."""
        pending = self._pending[origin]
        while self.parked >= self._parked_max or self.parked_bytes + nbytes > self._bytes_max:
            farthest = max(pending, default=0)
            if farthest <= n:
                return False
            self._unpark(pending, farthest)
            self.dropped += 1
        return True

    def _drain(self, queue: list[Origin], out: list[Delivery]) -> None:
        while queue:
            origin = queue.pop()
            pending = self._pending.get(origin)
            if not pending or origin in self._frozen:
                continue
            n = self._applied.get(origin, 0)
            ready: list[Update] = []
            while (parked := pending.get(n + 1)) is not None:
                update = parked.update
                missing = self._first_missing(origin, update) if update.deps else None
                if missing is not None:
                    self._block(origin, missing)
                    break
                ready.append(update)
                self._unpark(pending, n + 1)
                n += 1
            if ready:
                self._applied[origin] = n
                out.append((origin, ready))
                # Its own turn comes again: what it woke may be what it now waits for.
                queue += self._woken(origin)

    def _first_missing(self, origin: Origin, update: Update) -> Dot | None:
        applied = self._applied
        for dot in update.deps:
            if applied.get(dot.origin, 0) < dot.n and dot.origin != origin and not self.retired(dot.origin):
                return dot
        return None

    def _block(self, origin: Origin, dot: Dot) -> None:
        if self._waits_for.get(origin) != dot:
            self._waits_for[origin] = dot
            self._blocked.setdefault(dot.origin, []).append((dot.n, origin))

    def _woken(self, origin: Origin) -> list[Origin]:
        """Origins whose head waited for a dot of `origin` that is applied now."""
        waiting = self._blocked.get(origin)
        if not waiting:
            return []
        applied = self._applied.get(origin, 0)
        woken = [other for n, other in waiting if n <= applied and self._waits_for.get(other) == Dot(origin, n)]
        left = [(n, other) for n, other in waiting if n > applied]
        if left:
            self._blocked[origin] = left
        else:
            del self._blocked[origin]
        for other in woken:
            self._waits_for.pop(other, None)
        return woken

    def _unblock(self, origin: Origin) -> None:
        """The head that waited is gone."""
        dot = self._waits_for.pop(origin, None)
        if dot is not None:
            self._blocked[dot.origin] = [item for item in self._blocked[dot.origin] if item != (dot.n, origin)]

    def _unpark(self, pending: dict[int, _Parked], n: int) -> None:
        self.parked -= 1
        self.parked_bytes -= pending.pop(n).nbytes

    def _forget_parked(self, origin: Origin, upto: int) -> None:
        pending = self._pending.get(origin, {})
        for n in [n for n in pending if n <= upto]:
            self._unpark(pending, n)


def dots_of(deliveries: Iterable[Delivery]) -> list[Dot]:
    """The dots of what was handed out, in order."""
    return [Dot(origin, update.n) for origin, updates in deliveries for update in updates]
