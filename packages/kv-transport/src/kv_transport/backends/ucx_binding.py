"""Opens UCX through whichever Python binding there is, and says what this machine's UCX can do.

`ucxx` comes with the extra `[ucx]`; `ucp` (ucx-py) is used where it is installed and ucxx is not. Both give a context
and a worker with their raw handles, which is all that `ucp_api` needs of them.
"""

import fcntl
import importlib
import importlib.metadata
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kv_core.errors import MissingExtraError
from kv_transport.errors import BackendUnavailable

_BINDINGS: Final = (("ucxx", "ucxx._lib.libucxx"), ("ucp", "ucp._libs.ucx_api"))
_RESOURCE: Final = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+?)/(\S+)")
_RDMA: Final = ("rc", "dc", "ud", "srd")
_SIOCGIFADDR: Final = 0x8915
_SYS_INFINIBAND: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class UcxDevices:
    """What the opened context may use: pairs of transport and device, such as `rc_mlx5` and `mlx5_0:1`."""

    pairs: tuple[tuple[str, str], ...]

    @property
    def has_rdma(self) -> bool:
        return any(transport.partition("_")[0] in _RDMA for transport, _ in self.pairs)

    def __str__(self) -> str:
        return ", ".join(f"{transport}/{device}" for transport, device in self.pairs) or "none"


class UcxBinding:
    """An open context and worker of one binding."""

    def __init__(self, name: str, version: str, context: Any, worker: Any) -> None:
        self.name: Final = name
        self.version: Final = version
        self.context_handle: Final = int(context.handle)
        self.worker_handle: Final = int(worker.handle)
        info = context.info
        self.devices: Final = parse_devices(info() if callable(info) else info)
        self._kept: tuple[Any, ...] | None = (worker, context)

    def close(self) -> None:
        """Destroy worker and context: bindings do so when they are let go."""
        self._kept = None


def open_binding(
    options: dict[str, str], import_module: Callable[[str], ModuleType] = importlib.import_module
) -> UcxBinding:
    """Open a context (tagged messages, RMA, wake-up) and a worker, to be progressed by the calling thread.

    Raises:
        MissingExtraError: there is no binding.
        BackendUnavailable: there is one, but UCX does not start.
    """
    for name, module in _BINDINGS:
        try:
            api: Any = import_module(module)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            raise BackendUnavailable(
                scheme="ucx", reason=f"{name} is installed and cannot be loaded: {error}"
            ) from error
        try:
            features = (api.Feature.TAG, api.Feature.WAKEUP, api.Feature.RMA)
            context = api.UCXContext(options, features)
            worker = api.UCXWorker(context, **_worker_options(name))
        except Exception as error:  # each binding has errors of its own
            raise BackendUnavailable(scheme="ucx", reason=f"{name} does not start: {error}") from error
        return UcxBinding(name, _version(name), context, worker)
    raise MissingExtraError(feature="the ucx transport", module="ucxx", package="kv-transport", extra="ucx")


def _worker_options(name: str) -> dict[str, bool]:
    # Nothing of ucxx's own threads and futures is used: one thread of ours progresses the worker.
    return {"enable_delayed_submission": False, "enable_python_future": False} if name == "ucxx" else {}


def _version(name: str) -> str:
    for distribution in (f"{name}-cu13", f"{name}-cu12", name, "ucx-py"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def parse_devices(info: str) -> UcxDevices:
    """The resources of a context, from what UCX prints about it."""
    return UcxDevices(tuple((found[1], found[2]) for found in _RESOURCE.finditer(info)))


def network_devices(host: str) -> str:
    """The value of UCX's NET_DEVICES that keeps it to the interface that holds `host`, RDMA ports of it included.

    Raises:
        BackendUnavailable: no interface holds that IPv4 address.
    """
    if host == "0.0.0.0":
        return "all"
    interface = "lo" if host == "localhost" or host.startswith("127.") else _interface_of(host)
    return ",".join([*_rdma_ports(interface), interface])


def _interface_of(host: str) -> str:
    try:
        wanted = socket.inet_aton(host)
    except OSError:
        raise BackendUnavailable(scheme="ucx", reason=f"{host!r} is not an IPv4 address") from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == wanted:
                return name
    raise BackendUnavailable(scheme="ucx", reason=f"no network interface holds {host}")


def _rdma_ports(interface: str) -> list[str]:
    """`device:port` of the RDMA ports behind a network interface."""
    found: dict[str, None] = {}
    for entry in sorted(_SYS_INFINIBAND.glob("*/ports/*/gid_attrs/ndevs/*")):
        try:
            name = entry.read_text().strip()
        except OSError:
            continue  # an unused entry of the table
        if name == interface:
            device, port = entry.parts[-6], entry.parts[-4]
            found[f"{device}:{port}"] = None
    return list(found)
