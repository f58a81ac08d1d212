"""Key pairs of all processes of a cluster, written where the bus looks for them."""

from kv_services.config import ClusterConfig


def write_keys(config: ClusterConfig) -> None:
    """Make what is missing of the cluster's keys in its state folder; nothing when `bus.curve` is off."""
    if not config.bus.curve:
        return
