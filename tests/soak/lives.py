"""Which processes ended though nobody ended them: each is a fault of the product, told with the last it said."""

from dataclasses import dataclass, field

from kv_services.launch import LocalCluster
from kv_services.launch.processes import ProcessState

LAST_LINES = 12


@dataclass
class Lives:
    """What the launcher tells of processes, held against what the run itself does to them."""

    struck: set[str] = field(default_factory=set)
    """Those that a fault is ending or starting just now."""

    ended: list[str] = field(default_factory=list)
    """Those that ended by themselves, in words."""

    gone: list[str] = field(default_factory=list)
    """Those of them that were not started again yet."""

    cluster: LocalCluster | None = None

    def changed(self, node: str, state: ProcessState) -> None:
        """The launcher saw a process change."""
        if state is not ProcessState.EXITED or node in self.struck or self.cluster is None:
            return
        said = self.cluster.logs(node, LAST_LINES)
        self.ended.append(f"{node} ended by itself with status {self.cluster.status(node)}; the last it said:\n{said}")
        self.gone.append(node)

    def over(self) -> None:
        """From here on processes end because the run does."""
        self.cluster = None

    async def start_again(self) -> list[str]:
        """Start those that ended by themselves, so that the run goes on; which."""
        again, self.gone = self.gone, []
        for node in again:
            assert self.cluster is not None
            await self.cluster.restart(node)
        return again
