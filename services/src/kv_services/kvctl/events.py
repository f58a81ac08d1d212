"""`kvctl events`: what every process noted lately, in the order in which it happened, each with its cause."""

import datetime
from pathlib import Path

import msgspec
from rich.table import Table

from kv_services.config import ClusterConfig
from kv_services.config_file import load_config
from kv_services.kvctl.output import console, print_json
from kv_services.kvctl.status import ask_all
from kv_services.launch.signals import run_until_signal


def run(file: Path, as_json: bool) -> int:
    """Show the events of all processes that answer; 1 when one does not.

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_config(file)
    return run_until_signal(lambda hurry: _show(config, as_json))


async def _show(config: ClusterConfig, as_json: bool) -> int:
    rows = await ask_all(config)
    found = sorted(
        ((event, row.node.id) for row in rows if row.report for event in row.report.events),
        key=lambda item: item[0].at_s,
    )
    silent = {row.node.id: row.problem for row in rows if row.report is None}
    if as_json:
        events = [{"process": name} | msgspec.to_builtins(event) for event, name in found]
        print_json({"events": events, "silent": silent})
        return 1 if silent else 0
    table = Table("when", "process", "what", "nodes", "times", "request", "cause")
    for event, name in found:
        when = datetime.datetime.fromtimestamp(event.at_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(when, name, event.kind, event.link, str(event.count), event.request, event.cause)
    out = console()
    out.print(table)
    for name, problem in silent.items():
        out.print(f"{name}: {problem}")
    return 1 if silent else 0
