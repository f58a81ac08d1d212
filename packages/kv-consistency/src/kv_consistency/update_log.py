"""The updates of every origin, kept so that others can fetch what they missed.

Decides what is kept: each origin's log is a run of consecutive dots that ends at what is applied. It is cut at the
front where every living member has applied it (causal stability), or where the bound of all logs together is reached;
who needs more than is left gets a snapshot.

L1: `low .. applied` is held without a hole. L2: the logs together hold at most `bytes_max`, by the estimate of
`estimated_nbytes`. L3: what is handed out is what was appended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_consistency import limits
from kv_consistency.update import Update, estimated_nbytes
from kv_consistency.version_vector import Origin, VersionVector


@dataclass(slots=True)
class _Log:
    """Updates `low, low + 1, ...` of one origin with their sizes."""

    low: int = 1
    updates: list[Update] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nbytes: int = 0

    def cut(self, count: int) -> int:
        """Drop the oldest `count`; returns the bytes freed."""
        freed = sum(self.sizes[:count])
        del self.updates[:count], self.sizes[:count]
        self.low += count
        self.nbytes -= freed
        return freed


class UpdateLog:
    """The logs of all origins under one bound."""

    __slots__ = ("_bytes_max", "_logs", "nbytes", "truncated")

    def __init__(self, bytes_max: int = limits.MAX_LOG_BYTES) -> None:
        self._bytes_max = bytes_max
        self._logs: dict[Origin, _Log] = {}
        self.nbytes = 0
        self.truncated = 0
        """Updates cut because of the bound, not because everybody had them."""

    def extend(self, origin: Origin, updates: Sequence[Update]) -> None:
        """Append what was just applied, in order."""
        log = self._logs.get(origin)
        if log is None:
            log = self._logs[origin] = _Log(low=updates[0].n)
        assert updates[0].n == log.low + len(log.updates), "a log has no holes"
        if len(updates) == 1:
            added = estimated_nbytes(updates[0])
            log.updates.append(updates[0])
            log.sizes.append(added)
        else:
            sizes = list(map(estimated_nbytes, updates))
            added = sum(sizes)
            log.updates += updates
            log.sizes += sizes
        log.nbytes += added
        self.nbytes += added
        if self.nbytes > self._bytes_max:
            self._shed()

    def low(self, origin: Origin) -> int | None:
        """The lowest dot held, or the next one where all was cut; None for an origin without a log."""
        log = self._logs.get(origin)
        return None if log is None else log.low

    def nbytes_from(self, origin: Origin, first: int) -> int:
        """Bytes of the updates from `first` on."""
        log = self._logs.get(origin)
        return 0 if log is None else sum(log.sizes[max(0, first - log.low) :])

    def slice(self, origin: Origin, first: int, last: int, bytes_max: int) -> tuple[Update, ...]:
        """Updates `first .. last`, as many as `bytes_max` holds but at least one; empty if `first` is not held."""
        log = self._logs.get(origin)
        if log is None or not log.low <= first < log.low + len(log.updates):
            return ()
        begin = first - log.low
        end = min(last - log.low + 1, len(log.updates), begin + limits.MAX_UPDATES_PER_BATCH)
        taken = 0
        for i in range(begin, end):
            taken += log.sizes[i]
            if taken > bytes_max and i > begin:
                end = i
                break
        return tuple(log.updates[begin:end])

    def cut_stable(self, stable: VersionVector) -> None:
        """Drop what every living member has applied."""
        for origin, log in self._logs.items():
            count = min(stable[origin] - log.low + 1, len(log.updates))
            if count > 0:
                self.nbytes -= log.cut(count)

    def restart_at(self, origin: Origin, applied: int) -> None:
        """A snapshot took the origin to `applied`: the log begins after it."""
        self.forget(origin)
        self._logs[origin] = _Log(low=applied + 1)

    def forget(self, origin: Origin) -> None:
        """The origin is retired."""
        log = self._logs.pop(origin, None)
        if log is not None:
            self.nbytes -= log.nbytes

    def check(self) -> None:
        """Assert L1 and L2 and the sums."""
        assert self.nbytes == sum(log.nbytes for log in self._logs.values()) <= self._bytes_max
        for log in self._logs.values():
            assert log.nbytes == sum(log.sizes) and len(log.sizes) == len(log.updates)
            assert [update.n for update in log.updates] == list(range(log.low, log.low + len(log.updates)))

    def _shed(self) -> None:
        """Over the bound: cut a quarter of the largest log until it holds again."""
        while self.nbytes > self._bytes_max:
            log = max(self._logs.values(), key=lambda log: log.nbytes)
            count = max(1, len(log.updates) // 4)
            self.truncated += count
            self.nbytes -= log.cut(count)
