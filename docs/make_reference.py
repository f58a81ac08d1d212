"""Writes the reference pages of the manual from the code: `python -m docs.make_reference`; `--check` only compares.

What the code can say of itself is never written twice: the commands with their options, the fields of a cluster file
with types and defaults, and the metrics.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer.main
from msgspec import NODEFAULT
from msgspec import inspect as mi
from prometheus_client.metrics import MetricWrapperBase
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from kv_services.config import ClusterConfig
from kv_services.config_errors import describe
from kv_services.kvctl import app
from kv_services.kvctl.files import field_description, table_fields
from kv_services.metrics import Metrics

FOLDER: Final = Path(__file__).parent / "reference"
_MADE: Final = "<!-- Made from the code by `make docs`; edit that instead. -->\n"


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {"kvctl.md": kvctl_page(), "cluster-file.md": cluster_file_page(), "metrics.md": metrics_page()}


def kvctl_page() -> str:
    """Every command of kvctl with its arguments and options."""
    lines = [_MADE, "# kvctl", "", *_prose(app.info.help or ""), ""]
    for path, command in _commands(typer.main.get_command(app), "kvctl"):
        positional = [p for p in command.params if isinstance(p, TyperArgument)]
        options = [p for p in command.params if isinstance(p, TyperOption)]
        usage = " ".join([path, *(str(p.metavar or p.name).upper() for p in positional), "[OPTIONS]" * bool(options)])
        lines += [f"## {path}", "", *_prose(command.help or ""), "", "```", usage.strip(), "```", ""]
        if options:
            lines += ["| option | default | meaning |", "|---|---|---|"]
            lines += [f"| `{'`, `'.join(p.opts)}` | {_default(p)} | {_cell(p.help or '')} |" for p in options]
            lines.append("")
    return "\n".join(lines)


def _commands(command: object, path: str) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperCommand):
        yield path, command
    elif isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from _commands(child, f"{path} {name}")


def _default(parameter: TyperOption) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    if value is None or value is False or value == []:
        return ""
    return f"`{getattr(value, 'value', value)}`"


def cluster_file_page() -> str:
    """Every table and field of a cluster file."""
    root = mi.type_info(ClusterConfig)
    assert isinstance(root, mi.StructType)
    lines = [
        _MADE,
        "# The cluster file",
        "",
        "One TOML file describes a cluster. A field that is not listed here is an error, and so is a value that does",
        "not fit; the message has the file, the path of the field and what was expected. `kvctl config example` prints",
        "a whole file, `kvctl config check FILE` looks at one.",
        "",
    ]
    for table in root.fields:
        lines += _table(table.encode_name, table.type)
    return "\n".join(lines)


def _table(name: str, kind: mi.Type) -> list[str]:
    """One table of the file, then those within it."""
    many = isinstance(_bare(kind), mi.ListType)
    lines = [f"## {name}", "", *_prose(_table_doc(kind)), ""]
    within = {field.encode_name: inner for field in table_fields(kind) if (inner := _struct_of(field.type))}
    plain = [field for field in table_fields(kind) if field.encode_name not in within]
    if plain:
        lines += ["```toml", f"[[{name}]]" if many else f"[{name}]", "```", ""]
        lines += ["| field | default | expected | meaning |", "|---|---|---|---|"]
    for field in plain:
        expected = _cell(describe(field.type))
        meaning = _cell(field_description(field.type))
        lines.append(f"| `{field.encode_name}` | {_field_default(field)} | {expected} | {meaning} |")
    lines += [""] * bool(plain)
    for inner_name, inner in within.items():
        lines += _table(f"{name}.{inner_name}", inner)
    return lines


def _struct_of(kind: mi.Type) -> mi.StructType | None:
    """The table that a field holds, if it may hold one."""
    bare = _bare(kind)
    for one in map(_bare, bare.types) if isinstance(bare, mi.UnionType) else (bare,):
        if isinstance(one, mi.StructType):
            return one
    return None


def _table_doc(kind: mi.Type) -> str:
    bare = _bare(kind)
    struct = _bare(bare.item_type) if isinstance(bare, mi.ListType) else bare
    assert isinstance(struct, mi.StructType)
    return struct.cls.__doc__ or ""


def _bare(kind: mi.Type) -> mi.Type:
    while isinstance(kind, mi.Metadata):
        kind = kind.type
    return kind


def _field_default(field: mi.Field) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def metrics_page() -> str:
    """Every metric that a process may serve."""
    lines = [
        _MADE,
        "# Metrics",
        "",
        "Every process serves these on `/metrics`, in Prometheus' text form; those that its role has no use for stay",
        "at zero. A counter's samples end in `_total`.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    registry = Metrics("node", "role").registry
    # The exporter shows label names only where there are samples, so they are taken from the collectors.
    collectors: dict[object, list[str]] = vars(registry)["_collector_to_names"]
    for collector in collectors:
        labels = ", ".join(vars(collector)["_labelnames"])
        described = collector.describe() if isinstance(collector, MetricWrapperBase) else ()
        lines += [f"| `{one.name}` | {one.type} | {labels} | {_cell(one.documentation)} |" for one in described]
    return "\n".join([*lines, ""])


def _prose(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Write the pages, or compare them; the exit status says whether any differed when comparing."""
    check = "--check" in sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, text in pages().items():
        file = FOLDER / name
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            file.write_text(text, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
