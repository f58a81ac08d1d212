"""A node whose KV address, as it tells it to others, is a proxy's: `faulty_node.py PORT NODE-ARGUMENTS...`.

Everything else is the product's own program; only where others are told to connect to is changed.
"""

import sys

from kv_services import main
from kv_transport.backends.tcp import TcpBackend


def address_of_proxy(self: TcpBackend) -> bytes | None:
    return f"127.0.0.1:{PORT}".encode()


PORT = int(sys.argv[1])
TcpBackend.address = address_of_proxy  # type: ignore[method-assign]  # the point of this program
main.node(sys.argv[2:])
