"""The bus over ZeroMQ.

    bus = ZmqBus(ZmqBusConfig(...), registry, stamper=stamper)

CURVE cannot be switched off: without keys nobody's name could be believed (B3).
"""

from kv_bus.endpoint import Endpoint
from kv_bus.interface import Stamper
from kv_bus.zmq_bus.carrier import ZmqBusConfig, ZmqCarrier
from kv_bus.zmq_bus.sockets import parse_address, require_libzmq
from kv_core.clock import Clock, SystemClock
from kv_core.wire import Registry

__all__ = ["ZmqBus", "ZmqBusConfig", "parse_address", "require_libzmq"]


class ZmqBus(Endpoint):
    """A `Bus` over ZeroMQ.

    Args:
        config: who we are, where we bind, whom we admit.
        registry: the message types of this process.
        stamper: stamps what is sent, learns from what arrives.
        clock: deadlines are on its monotonic clock.

    Raises:
        LibzmqTooOld: libzmq below 4.3.1, or without CURVE.
        BadAddress: an address that is no single IP and port.
        KeyFileError: our key is not the one that the allow-list has for us.
    """

    def __init__(
        self, config: ZmqBusConfig, registry: Registry, *, stamper: Stamper, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        carrier = ZmqCarrier(config, clock)
        super().__init__(config.node_id, config.incarnation, registry, carrier, stamper=stamper, clock=clock)
