"""Start, watch and stop the processes of a cluster on this machine; nothing outlives the launcher.

    async with LocalCluster(local_config(ports)) as cluster:
        await cluster.kill("decode-1")

`processes` runs one process, `group` the processes of one file, `cluster` a whole cluster in a folder of its own.
`ports` finds and holds ports, `keys` makes keys, `readiness` waits, `leftovers` looks for what stayed behind,
`signals` turns Ctrl-C into an ordered stop.
"""

from kv_services.launch.cluster import LocalCluster
from kv_services.launch.errors import LaunchError, NoFreePortError, ProcessExitedError, ProcessNotReadyError
from kv_services.launch.group import START_TIMEOUT_S, STOP_ORDER, ProcessGroup
from kv_services.launch.keys import write_keys
from kv_services.launch.local_config import local_config
from kv_services.launch.ports import PortReservation, ephemeral_low
from kv_services.launch.processes import ManagedProcess, ProcessState
from kv_services.launch.signals import finish, run_until_signal

__all__ = [
    "START_TIMEOUT_S",
    "STOP_ORDER",
    "LaunchError",
    "LocalCluster",
    "ManagedProcess",
    "NoFreePortError",
    "PortReservation",
    "ProcessExitedError",
    "ProcessGroup",
    "ProcessNotReadyError",
    "ProcessState",
    "ephemeral_low",
    "finish",
    "local_config",
    "run_until_signal",
    "write_keys",
]
