"""Whether this machine, and the control group this process lives in, still has the memory for an arena.

A memfd is not bounded by /dev/shm, and its pages are taken when they are first written: an arena that is too large
is not refused by the kernel but ends in the out-of-memory killer. So the bound is checked before.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kv_transport.errors import MemoryUnavailable


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Reads the limits under `root` (`/` in production).

    Attributes:
        reserve_nbytes: memory that an arena must leave free.
    """

    reserve_nbytes: int = 256 << 20
    root: Path = Path("/")

    def require(self, need: int, promised: int = 0) -> None:
        """Raise `MemoryUnavailable` unless `need` bytes fit beside `promised`, which are taken but not yet touched."""
        available, limit = self.available()
        if need + promised + self.reserve_nbytes > available:
            raise MemoryUnavailable(
                need=need, available=max(0, available - promised), reserve=self.reserve_nbytes, limit=limit
            )

    def available(self) -> tuple[int, str]:
        """Bytes that can still be taken, and which limit says so."""
        candidates = [(self._machine(), "MemAvailable")]
        candidates += [(left, f"cgroup {where}") for where, left in self._cgroups()]
        return min(candidates)

    def _machine(self) -> int:
        for line in (self.root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _cgroups(self) -> list[tuple[str, int]]:
        """What each memory limit from our group up to the root leaves."""
        try:
            lines = (self.root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":
                base, names = self.root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                base = self.root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            group = base / path.lstrip("/")
            while True:
                left = _left_in_group(group, *names)
                if left is not None:
                    found.append((str(group.relative_to(base)), left))
                if group == base:
                    break
                group = group.parent
        return found


def _left_in_group(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes under the limit, counting file cache that can be dropped as free; None where there is no limit."""
    try:
        text = (group / limit_name).read_text().strip()
        if text == "max":
            return None
        used = int((group / usage_name).read_text())
        cache = 0
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache_name:
                cache = int(value)
        return int(text) - used + cache
    except (OSError, ValueError):
        return None
