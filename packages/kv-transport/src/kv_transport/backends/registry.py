"""Which transports an agent has, in order of preference."""

from kv_transport.backends.base import Backend, Surroundings
from kv_transport.backends.memory import MemoryBackend
from kv_transport.backends.memory_network import MemoryNetwork
from kv_transport.backends.shm import ShmBackend
from kv_transport.backends.tcp import TcpBackend
from kv_transport.backends.ucx import UcxBackend
from kv_transport.errors import BackendUnavailable


def make_backends(around: Surroundings, host_id: bytes, network: MemoryNetwork | None) -> list[Backend]:
    """The backends that the configuration asks for.

    Raises:
        BackendUnavailable: it lacks what they need.
    """
    wanted, config = around.config.transport, around.config
    backends: list[Backend] = []
    if wanted in ("auto", "shm") and config.socket_folder is not None:
        backends.append(ShmBackend(around, config.socket_folder, host_id))
    host = config.tcp_host
    if host is not None and (wanted == "ucx" or (wanted == "auto" and config.allow_ucx)):
        backends.append(UcxBackend(around, host, only_rdma=wanted == "auto"))
    if wanted in ("auto", "tcp") and config.tcp_host is not None:
        backends.append(TcpBackend(around, config.tcp_host, config.tcp_port))
    if wanted == "memory" and network is not None:
        backends.append(MemoryBackend(around, network))
    if not backends:
        reason = "the configuration names no socket_folder or tcp_host for it"
        if wanted == "memory":
            reason = "the agent was given no MemoryNetwork"
        raise BackendUnavailable(scheme=wanted, reason=reason)
    return backends
