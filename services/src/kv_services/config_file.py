"""Cluster files as text: read, checked, and written so that they read back equal.

Whatever is wrong is said with the file, the path in it (`$.node[2].bus_port`) and what was expected.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kv_services.config import ClusterConfig
from kv_services.config_checks import check_config
from kv_services.config_errors import ConfigError, explain

MAX_CONFIG_BYTES: Final = 4 << 20
"""A cluster file of 10,000 nodes takes 2 MiB; more is not a cluster file."""


def load_config(path: str | Path) -> ClusterConfig:
    """Read and check a cluster file; `state_dir` and `model.path` come back absolute.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or a field is wrong; the message has file, path and what
            was expected.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(file=str(file), path="$", problem=f"cannot read: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(file=str(file), path="$", problem=f"expected at most {MAX_CONFIG_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(file=str(file), path="$", problem=f"expected UTF-8 text, byte {error.start} is not") from None
    return parse_config(text, file=file)


def parse_config(text: str, *, file: str | Path = "cluster.toml") -> ClusterConfig:
    """Check a cluster file's text as if it lay at `file`.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(file=str(file), path="$", problem=f"expected TOML: {error}") from None
    except RecursionError:
        raise ConfigError(file=str(file), path="$", problem="expected TOML of a sane depth") from None
    try:
        config = msgspec.convert(table, ClusterConfig)
    except msgspec.ValidationError as error:
        where, problem = explain(str(error), table, ClusterConfig)
        raise ConfigError(file=str(file), path=where, problem=problem) from None
    check_config(config, file=file)
    base = Path(file).absolute().parent
    cluster, model = config.cluster, config.model
    cluster = msgspec.structs.replace(cluster, state_dir=str(base / cluster.state_dir))
    if model.path:
        model = msgspec.structs.replace(model, path=str(base / model.path))
    tiers = config.tiers
    if tiers.disk is not None and tiers.disk.path:
        disk = msgspec.structs.replace(tiers.disk, path=str(base / tiers.disk.path))
        tiers = msgspec.structs.replace(tiers, disk=disk)
    transport = config.transport
    if transport.tls_folder:
        transport = msgspec.structs.replace(transport, tls_folder=str(base / transport.tls_folder))
    return msgspec.structs.replace(config, cluster=cluster, model=model, transport=transport, tiers=tiers)


def dump_config(config: ClusterConfig) -> str:
    """The TOML text that `parse_config` reads back as an equal config."""
    lines: list[str] = []
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict):
            below = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
            lists = {key: v for key, v in value.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
            plain = {key: v for key, v in value.items() if key not in below and key not in lists}
            lines += [f"[{name}]", *_assignments(plain), ""]
            for key, inner in below.items():
                lines += [f"[{name}.{key}]", *_assignments(inner), ""]
            for key, tables in lists.items():
                for inner in tables:
                    lines += [f"[[{name}.{key}]]", *_assignments(inner), ""]
        else:
            for table in value:
                lines += [f"[[{name}]]", *_assignments(table), ""]
    return "\n".join(lines)


def _assignments(table: dict[str, object]) -> Iterator[str]:
    for name, value in table.items():
        if value is not None:
            yield f"{name} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(_TOML_ESCAPES.get(ch, ch) for ch in value) + '"'
    raise TypeError(f"no TOML form for {type(value).__name__}")


_TOML_ESCAPES: Final = {chr(code): f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | {'"': '\\"', "\\": "\\\\"}
