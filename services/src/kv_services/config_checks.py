"""What no single field of a cluster file can say: ids, ports, addresses, capacities, tenants, orders of thresholds."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kv_services.config import ClusterConfig, NodeConfig, Role
from kv_services.config_errors import ConfigError


def check_config(config: ClusterConfig, *, file: str | Path = "cluster.toml") -> None:
    """Check what no single field can say: ids, ports, addresses, capacities, tenants, orders of thresholds.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    for where, problem in _faults(config):
        raise ConfigError(file=str(file), path=where, problem=problem)


def _faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    yield from _node_faults(config)
    yield from _port_faults(config)
    yield from _tenant_faults(config)
    yield from _event_faults(config)
    yield from _etcd_faults(config)
    yield from _sharding_faults(config)
    bus, transport, limits = config.bus, config.transport, config.limits
    if bus.suspect_after_ms <= bus.heartbeat_interval_ms:
        yield "$.bus.suspect_after_ms", f"expected more than heartbeat_interval_ms ({bus.heartbeat_interval_ms})"
    pool = config.pool
    if pool.high_watermark < pool.low_watermark or (pool.low_watermark == 0) != (pool.high_watermark == 0):
        yield "$.pool.high_watermark", f"expected at least low_watermark ({pool.low_watermark:g}), or both 0"
    if bus.dead_after_ms <= bus.suspect_after_ms:
        yield "$.bus.dead_after_ms", f"expected more than suspect_after_ms ({bus.suspect_after_ms})"
    if transport.tls_folder and transport.allow_ucx:
        yield "$.transport.allow_ucx", "expected false with tls_folder: ucx moves KV unencrypted"
    if transport.backend == "ucx" and not transport.allow_ucx:
        yield "$.transport.backend", "expected allow_ucx = true with ucx, which has no authentication of its own"
    yield from _fidelity_faults(config)
    if 0 < config.model.max_context <= limits.max_prompt_tokens:
        yield "$.limits.max_prompt_tokens", f"expected less than model.max_context ({config.model.max_context})"


def _fidelity_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    model, transport = config.model, config.transport
    if "exact" not in model.kv_fidelities or len(set(model.kv_fidelities)) != len(model.kv_fidelities):
        yield "$.model.kv_fidelities", "expected exact, and each other one once"
    if len(model.kv_fidelities) > 1 and model.kv_dtype != "bf16":
        yield "$.model.kv_fidelities", f"expected exact alone: lossy codecs are for bf16, kv_dtype is {model.kv_dtype}"
    if transport.codec in ("auto", "none"):
        return
    if transport.backend in ("shm", "ucx"):
        yield "$.transport.codec", f"expected auto or none: backend {transport.backend} moves bytes as they are"
    if transport.codec != "lz4" and f"{transport.codec}/1" not in model.kv_fidelities:
        yield "$.transport.codec", f"expected {transport.codec}/1 in model.kv_fidelities, or nothing may use it"


def _node_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for index, node in enumerate(config.nodes):
        at = f"$.node[{index}]"
        if node.id in first:
            yield f"{at}.id", f"expected a unique id, {node.id!r} is also $.node[{first[node.id]}].id"
        first[node.id] = index
        problem = _host_problem(node, config)
        if problem:
            yield f"{at}.host", problem
        if not node.role.holds_kv:
            for field in ("slots", "capacity"):
                if getattr(node, field) is not None:
                    yield f"{at}.{field}", f"expected none: a {node.role.value} holds no KV"
            if node.data_port:
                yield f"{at}.data_port", f"expected none: a {node.role.value} moves no KV"
        elif (node.slots is None) == (node.capacity is None):
            yield at, f"expected either slots or capacity: a {node.role.value} holds KV"
        elif node.data_port == 0 and config.transport.backend != "shm":
            yield f"{at}.data_port", f"expected a port: transport.backend is {config.transport.backend!r}"


def _host_problem(node: NodeConfig, config: ClusterConfig) -> str:
    host = node.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"expected an IP address, got {host!r}"
    if address.is_unspecified:
        return f"expected one explicit address, {host!r} means every interface"
    if address.is_multicast:
        return f"expected the address of one host, {host!r} is a multicast group"
    if address.is_loopback:
        return ""
    if not config.cluster.allow_remote:
        return f"expected a loopback address, got {host!r}; set cluster.allow_remote = true to leave this machine"
    if node.role is Role.GATEWAY and not config.tenants:
        return f"expected a [[tenant]] with API keys, since a gateway on {host!r} serves the network"
    return ""


def _port_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    owner: dict[tuple[str, int], str] = {}
    for index, node in enumerate(config.nodes):
        for field, port in node.ports():
            where = f"$.node[{index}].{field}"
            other = owner.setdefault((node.host, port), where)
            if other != where:
                yield where, f"expected a port of its own, {port} of {node.host} is also {other}"


def _etcd_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    if config.cluster.discovery != "etcd" or config.cluster.allow_remote:
        return
    for number, endpoint in enumerate(config.etcd.endpoints):
        host = urlsplit(endpoint).hostname or ""
        try:
            here = ipaddress.ip_address(host).is_loopback
        except ValueError:
            here = host == "localhost"
        if not here:
            yield f"$.etcd.endpoints[{number}]", f"expected a loopback address, got {host!r}; or set allow_remote"


def _sharding_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    sharding, holders = config.sharding, [node.id for node in config.nodes if node.role.holds_kv]
    if (sharding.mode == "hybrid") != bool(sharding.groups):
        yield "$.sharding.groups", "expected groups of nodes with mode hybrid, and only with it"
    seen: set[str] = set()
    for number, group in enumerate(sharding.groups):
        if len(group) < 2:
            yield f"$.sharding.groups[{number}]", "expected at least two nodes"
        for place, name in enumerate(group):
            where = f"$.sharding.groups[{number}][{place}]"
            if name not in holders:
                yield where, f"expected a node that holds KV, got {name!r}"
            if name in seen:
                yield where, f"expected each node once, {name!r} has a place already"
            seen.add(name)
    if config.model.engine == "stub" and sharding.mode not in ("auto", "none"):
        yield "$.sharding.mode", "expected auto or none: the stub engine does not compute on pieces"
    if config.model.engine == "stub" and sharding.above_tokens:
        yield "$.sharding.above_tokens", "expected 0: the stub engine does not compute on pieces"
    if sharding.above_tokens and sharding.mode == "none":
        yield "$.sharding.above_tokens", "expected 0 with mode none"


def _tenant_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    ids = [tenant.id for tenant in config.tenants]
    keys = {key: f"$.cluster.operator_keys[{number}]" for number, key in enumerate(config.cluster.operator_keys)}
    for index, tenant in enumerate(config.tenants):
        at = f"$.tenant[{index}]"
        if ids.index(tenant.id) != index:
            yield f"{at}.id", f"expected a unique id, {tenant.id!r} is also $.tenant[{ids.index(tenant.id)}].id"
        for number, name in enumerate(tenant.shares_with):
            if name not in ids or name == tenant.id:
                yield f"{at}.shares_with[{number}]", f"expected the id of another tenant, got {name!r}"
        for number, key in enumerate(tenant.api_keys):
            where = f"{at}.api_keys[{number}]"
            other = keys.setdefault(key, where)
            if other != where:
                yield where, f"expected a key of its own, the same is at {other}"


def _event_faults(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    known = [tenant.id for tenant in config.tenants] or ["default"]
    for index, name in enumerate(config.kv_events.tenants):
        if name not in known:
            yield f"$.kv_events.tenants[{index}]", f"expected one of {', '.join(known)}, got {name!r}"
    names = [engine.name for engine in config.kv_events.follow]
    ids = {node.id for node in config.nodes}
    for index, engine in enumerate(config.kv_events.follow):
        # An index knows a holder by its name: under one name two would be one.
        if names.index(engine.name) != index:
            other = f"$.kv_events.follow[{names.index(engine.name)}]"
            yield f"$.kv_events.follow[{index}].name", f"expected a name of its own, {engine.name!r} is that of {other}"
        if engine.name in ids:
            yield f"$.kv_events.follow[{index}].name", f"expected a name of its own, {engine.name!r} is a node's id"
        if (engine.tenant or "default") not in known:
            yield f"$.kv_events.follow[{index}].tenant", f"expected one of {', '.join(known)}"
    for index, node in enumerate(config.nodes):
        at = f"$.node[{index}]"
        if bool(node.kv_events_port) != bool(node.kv_replay_port):
            yield f"{at}.kv_replay_port", "expected both kv_events_port and kv_replay_port, or neither"
        if node.kv_events_port and not node.role.holds_kv:
            yield f"{at}.kv_events_port", f"expected none: a {node.role.value} holds no KV"
