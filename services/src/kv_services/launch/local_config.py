"""A cluster file for this machine, with ports that are free now."""

from collections.abc import Sequence
from typing import Final

from kv_services.config import (
    BusSection,
    ClusterConfig,
    ClusterSection,
    HealthSection,
    LimitsSection,
    ModelSection,
    NodeConfig,
    Role,
    TenantConfig,
    TiersSection,
    TransportSection,
)
from kv_services.launch.ports import PortReservation

DEFAULT_SLOTS: Final = 256


def local_config(
    ports: PortReservation,
    *,
    name: str = "local",
    prefill: int = 2,
    decode: int = 2,
    stores: int = 0,
    gateways: int = 1,
    monitor: bool = True,
    slots: int = DEFAULT_SLOTS,
    compute_threads: int = 1,
    model: ModelSection | None = None,
    transport: TransportSection | None = None,
    bus: BusSection | None = None,
    health: HealthSection | None = None,
    limits: LimitsSection | None = None,
    tenants: Sequence[TenantConfig] = (),
    tiers: TiersSection | None = None,
) -> ClusterConfig:
    """A cluster of that many processes on the reservation's host; ids are `gateway`, `prefill-1`, `decode-1` and so on.

    Raises:
        NoFreePortError: more ports are needed than are free.
    """
    transport = transport or TransportSection()

    def node(node_id: str, role: Role) -> NodeConfig:
        tcp = role.holds_kv and transport.backend != "shm"
        return NodeConfig(
            id=node_id,
            role=role,
            host=ports.host,
            bus_port=ports.take(),
            events_port=ports.take(),
            http_port=ports.take(),
            data_port=ports.take() if tcp else 0,
            slots=slots if role.holds_kv else None,
            compute_threads=compute_threads if role.holds_kv else 1,
        )

    counts = ((Role.GATEWAY, gateways), (Role.PREFILL, prefill), (Role.DECODE, decode), (Role.STORE, stores))
    nodes = [
        node(role.value if role is Role.GATEWAY and count == 1 else f"{role.value}-{number}", role)
        for role, count in counts
        for number in range(1, count + 1)
    ]
    if monitor:
        nodes.append(node("monitor", Role.MONITOR))
    return ClusterConfig(
        cluster=ClusterSection(name=name),
        model=model or ModelSection(),
        transport=transport,
        bus=bus or BusSection(),
        health=health or HealthSection(),
        limits=limits or LimitsSection(),
        tenants=list(tenants),
        tiers=tiers or TiersSection(),
        nodes=nodes,
    )
