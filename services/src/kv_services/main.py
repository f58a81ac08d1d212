"""The entry points of the services: `kv-gateway`, `kv-node` and `kv-monitor`, each `--config FILE --node ID`."""

import argparse
import sys
from collections.abc import Sequence

from kv_services.config import Role
from kv_services.config_errors import ConfigError
from kv_services.config_file import load_config
from kv_services.process import Build, run, set_up_logging

_NODE_ROLES = (Role.PREFILL, Role.DECODE, Role.STORE)


def gateway(argv: Sequence[str] | None = None) -> None:
    """Run a gateway; never returns."""
    from kv_services.gateway.process import build

    _main("kv-gateway", "Route chat requests to a cluster's nodes.", (Role.GATEWAY,), build, argv)


def node(argv: Sequence[str] | None = None) -> None:
    """Run a node that holds KV; never returns."""
    from kv_services.node.process import build

    _main("kv-node", "Hold KV, and prefill or decode with it.", _NODE_ROLES, build, argv)


def monitor(argv: Sequence[str] | None = None) -> None:
    """Run the monitor; never returns."""
    from kv_services.monitor.process import build

    _main("kv-monitor", "Watch a cluster's health.", (Role.MONITOR,), build, argv)


def _main(program: str, about: str, roles: tuple[Role, ...], build: Build, argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(program, description=about)
    parser.add_argument("--config", required=True, metavar="FILE", help="the cluster file")
    parser.add_argument("--node", required=True, metavar="ID", help="which process of the file this is")
    parser.add_argument(
        "--role", choices=[role.value for role in roles], help="refuse to start if the file gives another role"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    args = parser.parse_args(argv)
    set_up_logging(args.log_level)
    try:
        config = load_config(args.config)
        chosen = config.node(args.node)
    except ConfigError as error:
        sys.exit(f"{program}: {error}")
    allowed = [role for role in roles if args.role in (None, role.value)]
    if chosen.role not in allowed:
        names = " or ".join(role.value for role in allowed)
        sys.exit(f"{program}: {chosen.id} is a {chosen.role.value} in {args.config}, not a {names}")
    sys.exit(run(config, chosen, build))
