"""The commands, their options and their help. What they do lies in one module each, imported when it is asked for.

Exit status: 0 done, 1 an error that the last line names, 2 a wrong command line, 128 + n ended by signal n.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kv_core.dtypes import DType
from kv_core.geometry import Attention
from kv_services.kvctl.guard import ConfigFile, Json
from kv_services.kvctl.guard import guarded as _guarded
from kv_services.kvctl.prefix_app import prefix_app


class EvictionOrder(Enum):
    """Which blocks a replayed cache may evict."""

    AUTO = "auto"
    TAIL = "tail"
    ANY = "any"


class KVRole(Enum):
    """Which work a node that holds KV can be given."""

    PREFILL = "prefill"
    DECODE = "decode"


app = typer.Typer(
    name="kvctl",
    help="Run, look at and size a distributed KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = typer.Typer(help="Key pairs of a cluster's processes.", no_args_is_help=True)
config_app = typer.Typer(help="The file that describes a cluster.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(config_app, name="config")
app.add_typer(prefix_app, name="prefix")


@app.command()
@_guarded
def size(
    model: Annotated[str, typer.Option(help="Preset name, a Hugging Face config.json, or a GGUF file.")],
    tokens: Annotated[int, typer.Option(min=0, help="Length of the sequence.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Element type of the KV.")] = DType.FP16,
    attention: Annotated[
        Attention | None, typer.Option(help="As if the model had been built with this attention.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a block.")] = 16,
    json: Json = False,
) -> None:
    """How many bytes of KV a model makes: per token and layer, per token, per sequence."""
    from kv_services.kvctl import size as command

    command.show(model, tokens, dtype, attention, block_size, json)


@keys_app.command("init")
@_guarded
def keys_init(
    file: ConfigFile,
    node: Annotated[list[str] | None, typer.Option(help="Only for this node; may be given more than once.")] = None,
) -> None:
    """Make the key pairs that are missing, and the list of the keys that the cluster admits.

    Existing keys are kept. The list is written anew: nodes that left the file are no longer admitted.
    """
    from kv_services.kvctl import files

    files.init_keys(file, node)


@config_app.command("check")
@_guarded
def config_check(file: ConfigFile, json: Json = False) -> int:
    """Say whether a cluster file is right, and what in it deserves a second look."""
    from kv_services.kvctl import files

    return files.check(file, json)


@config_app.command("example")
@_guarded
def config_example() -> None:
    """Print a cluster file with every field, its meaning and its default, on ports that are free here."""
    from kv_services.kvctl import files

    files.example()


@app.command()
@_guarded
def up(
    file: ConfigFile,
    node: Annotated[list[str] | None, typer.Option(help="Only this node; may be given more than once.")] = None,
) -> int:
    """Run the processes of a cluster file in the foreground, until Ctrl-C; a second one does not wait for them."""
    from kv_services.kvctl import up as command

    return command.run(file, node)


@app.command()
@_guarded
def status(
    file: ConfigFile,
    json: Json = False,
    watch: Annotated[
        float | None, typer.Option(min=0.2, metavar="SECONDS", help="Show it again every so often, until Ctrl-C.")
    ] = None,
) -> int:
    """Ask every process of a cluster file how it is. Exit status 1 when one does not answer or is not well."""
    from kv_services.kvctl import status as command

    return command.run(file, json, watch)


Rate = Annotated[str, typer.Option(metavar="SIZE", help='Most bytes a second that a node gives away, as "64 MiB".')]


@app.command()
@_guarded
def drain(
    file: ConfigFile,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node that shall leave.", show_default=False)],
    rate: Rate = "64 MiB",
    resume: Annotated[bool, typer.Option("--resume", help="Have a draining node stay and take work again.")] = False,
    json: Json = False,
) -> int:
    """Have a node hand over its requests and its blocks, and wait until it is safe to stop. Needs an operator's key.

    Blocks that nobody else holds go to nodes with free slots; what finds no room is listed and counted.
    """
    from kv_services.kvctl import operate

    return operate.drain(file, node, rate, json, resume)


@app.command()
@_guarded
def rebalance(
    file: ConfigFile,
    watch: Annotated[bool, typer.Option("--watch", help="Show how far it is, until all are done.")] = False,
    rate: Rate = "64 MiB",
    json: Json = False,
) -> int:
    """Have the nodes of each role share their blocks by capacity, with the fewest moved. Needs an operator's key."""
    from kv_services.kvctl import operate

    return operate.rebalance(file, rate, watch, json)


@app.command()
@_guarded
def events(file: ConfigFile, json: Json = False) -> int:
    """What the processes of a cluster noted lately: recoveries, links given up and healed, each with its cause."""
    from kv_services.kvctl import events as command

    return command.run(file, json)


@app.command()
@_guarded
def role(
    file: ConfigFile,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node.", show_default=False)],
    new: Annotated[KVRole, typer.Argument(metavar="ROLE", help="prefill or decode.", show_default=False)],
) -> int:
    """Have a node work as a prefill or a decode node from now on, without a restart. Needs an operator's key."""
    from kv_services.kvctl import operate

    return operate.role(file, node, new.value)


@app.command()
@_guarded
def demo(
    requests: Annotated[int, typer.Option(min=1, max=64, help="Chat requests to answer.")] = 8,
    model: Annotated[Path | None, typer.Option(help="A Llama-type GGUF instead of the packaged SmolLM2-135M.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with logs and state.")] = False,
) -> int:
    """Start a cluster on this machine, answer chat requests, and compare every token with a single process."""
    from kv_services.kvctl.demo import command

    return command.run(requests, model, json, keep)


@app.command()
@_guarded
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in Mooncake's format.", show_default=False)],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy, or clairvoyant, which no policy reaches; may be given more than once."),
    ] = None,
    capacity_blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks of a node's memory; may be given more than once.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Nodes, of that capacity each.")] = 1,
    router: Annotated[str, typer.Option(help="Placement policy over the nodes.")] = "kv_aware",
    disk_blocks: Annotated[int, typer.Option(min=0, help="Blocks of a disk tier below each node's memory.")] = 0,
    remote_blocks: Annotated[int, typer.Option(min=0, help="Blocks of a remote tier below that.")] = 0,
    order: Annotated[
        EvictionOrder,
        typer.Option(help="tail: as a node evicts. any: as a textbook cache. auto: any for one pool of lru or fifo."),
    ] = EvictionOrder.AUTO,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against capacity into this file.")] = None,
    json: Json = False,
) -> int:
    """Say what the prefix cache would have hit of a recorded trace: default policy `adaptive`, 10,000 blocks.

    It uses the index, pool, eviction and placement of the services. Hits are the unbroken run of blocks that was there
    before the request.
    """
    from kv_services.kvctl.replay import command
    from kv_services.kvctl.replay.engine import Setup

    setup = Setup(nodes=nodes, router=router, order=order.value, disk_blocks=disk_blocks, remote_blocks=remote_blocks)
    return command.run(trace, setup, policy or ["adaptive"], capacity_blocks or [10_000], plot, json)


@app.command()
@_guarded
def workload(
    kind: Annotated[str, typer.Argument(help="chat, documents, agents, drift or scan.", show_default=False)],
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The file to write.", show_default=False)],
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many requests.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 1,
    json: Json = False,
) -> int:
    """Write a generated trace for `kvctl replay`, for those who have no recorded one."""
    from kv_services.kvctl.replay import command

    return command.write_workload(kind, trace, requests, seed, json)


@app.command()
@_guarded
def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Virtual seconds under faults, for each seed.")] = 60.0,
    nodes: Annotated[int, typer.Option(min=3, max=32, help="Nodes of the simulated cluster.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="A kind of fault, such as 'crash'; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes to run in; 0: one for each core.")] = 0,
    record: Annotated[Path | None, typer.Option(help="Add a line of JSON for each seed to this file.")] = None,
    json: Json = False,
) -> int:
    """Run a whole cluster under seeded faults in virtual time, and check it all along."""
    from kv_services.kvctl.sim import default_jobs, run

    return run(seed, seeds, seconds, nodes, tuple(only or ()), json, jobs or default_jobs(), record)
