"""What every command of kvctl has: the cluster file, `--json`, and an end that names the error."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from kv_core.errors import KVError

P = ParamSpec("P")

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn an error of ours into its sentence and exit status 1; anything else is a bug and keeps its traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs)
        except KVError as error:
            typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(1) from None
        raise typer.Exit(status or 0)

    return run
