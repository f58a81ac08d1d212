"""Start, watch and stop the processes of a cluster on this machine; nothing outlives the launcher.

    async with LocalCluster(local_config(ports)) as cluster:
        await cluster.kill("decode-1")

`processes` runs one process, `ports` finds and holds ports, `readiness` waits, `leftovers` looks for what stayed
behind, `cluster` puts them together, `signals` turns Ctrl-C into an ordered stop.
"""

from kv_services.launch.cluster import START_TIMEOUT_S, STOP_ORDER, LocalCluster
from kv_services.launch.errors import LaunchError, NoFreePortError, ProcessExitedError, ProcessNotReadyError
from kv_services.launch.local_config import local_config
from kv_services.launch.ports import PortReservation
from kv_services.launch.processes import ManagedProcess, ProcessState
from kv_services.launch.signals import run_until_signal

__all__ = [
    "START_TIMEOUT_S",
    "STOP_ORDER",
    "LaunchError",
    "LocalCluster",
    "ManagedProcess",
    "NoFreePortError",
    "PortReservation",
    "ProcessExitedError",
    "ProcessNotReadyError",
    "ProcessState",
    "local_config",
    "run_until_signal",
]
