"""`kvctl config` and `kvctl keys`: checking, explaining and equipping a cluster file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import inspect as mi
from rich.table import Table

from kv_bus.keys import fingerprint
from kv_services.config import ClusterConfig, Role
from kv_services.config_file import dump_config, load_config
from kv_services.kvctl.output import console, messages, print_json
from kv_services.launch.keys import write_keys
from kv_services.launch.local_config import local_config
from kv_services.launch.ports import PortReservation, ephemeral_low

_TENANT_EXAMPLE: Final = """
# [[tenant]]
# {tenant_id}
# id = "acme"
# {tenant_api_keys}
# api_keys = ["put the output of: openssl rand -hex 24"]
# {tenant_salt}
# salt = ""
"""


def check(file: Path, as_json: bool) -> int:
    """Load the file and print what it describes and what deserves a second look.

    Raises:
        ConfigError: it is wrong.
    """
    config = load_config(file)
    remarks = list(remarks_on(config, file))
    if as_json:
        roles = {role.value: len(config.by_role(role)) for role in Role}
        print_json({"file": str(file), "ok": True, "nodes": roles, "remarks": remarks})
        return 0
    out = console()
    counted = [f"{len(config.by_role(role))} {role.value}" for role in Role if config.by_role(role)]
    out.print(f"{file}: cluster {config.cluster.name!r}, {', '.join(counted)}, model {config.model.id}")
    for remark in remarks:
        out.print(f"note: {remark}")
    return 0


def remarks_on(config: ClusterConfig, file: Path) -> Iterator[str]:
    """What is allowed but may not be meant."""
    for role in (Role.GATEWAY, Role.DECODE):
        if not config.by_role(role):
            yield f"no {role.value}: this cluster answers no requests"
    low = ephemeral_low()
    for node in config.nodes:
        for field, port in node.ports():
            if port >= low:
                yield (
                    f"{field} {port} of {node.id} is in this machine's ephemeral range (from {low}): an outgoing "
                    "connection may hold it when the process starts"
                )
    secret = config.tenants or config.cluster.operator_keys
    if secret and file.exists() and file.stat().st_mode & 0o077:
        yield f"{file} holds API keys and others can read it: chmod 600 {file}"


def init_keys(file: Path, node_ids: list[str] | None) -> None:
    """Make missing key pairs and the list, and print whose key is which.

    Raises:
        ConfigError, KeyFileError, AllowListError.
    """
    config = load_config(file)
    allow_list = write_keys(config, node_ids)
    table = Table("node", "public key", "key pair here")
    for node in config.nodes:
        key = allow_list.keys.get(node.node_id)
        here = (config.keys_path / f"{node.id}.key").exists()
        table.add_row(node.id, f"{fingerprint(key)}…" if key else "none yet", "yes" if here else "no")
    console().print(table)
    messages().print(
        f"keys in {config.keys_path}; every node needs its own .key file and {config.allow_list_path.name}"
    )


def example() -> None:
    """Print a commented cluster file."""
    with PortReservation() as ports:
        config = local_config(ports, name="example", prefill=1, decode=1)
    sys.stdout.write(commented(config))


def commented(config: ClusterConfig) -> str:
    """The file's text with each field's meaning before it, the first time it appears."""
    meanings = field_meanings()
    lines, table, told = [], "", set[str]()
    for line in dump_config(config).splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        name = line.partition(" = ")[0]
        meaning = meanings.get(f"{table}.{name}")
        if meaning and f"{table}.{name}" not in told:
            told.add(f"{table}.{name}")
            lines.append(f"# {meaning}")
        lines.append(line)
    tenant = _TENANT_EXAMPLE.format(**{name.replace(".", "_"): text for name, text in meanings.items()})
    return "\n".join(lines) + "\n" + tenant


def field_meanings() -> dict[str, str]:
    """What each field means, by `table.field`."""
    root = mi.type_info(ClusterConfig)
    assert isinstance(root, mi.StructType)
    found = {}
    for table in root.fields:
        for field in table_fields(table.type):
            description = field_description(field.type)
            if description:
                found[f"{table.encode_name}.{field.encode_name}"] = description
    return found


def table_fields(kind: mi.Type) -> tuple[mi.Field, ...]:
    """The fields of a table, or of the tables in a list."""
    while not isinstance(kind, mi.StructType):
        match kind:
            case mi.Metadata(type=inner) | mi.ListType(item_type=inner):
                kind = inner
            case _:
                return ()
    return kind.fields


def field_description(kind: mi.Type) -> str:
    """The `description` of a field's type; empty when it has none."""
    if isinstance(kind, mi.Metadata):
        return str((kind.extra_json_schema or {}).get("description", ""))
    return ""
