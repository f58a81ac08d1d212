"""How the commands print: tables on a terminal or in a file, JSON for programs, messages to standard error."""

import sys
from collections.abc import Mapping
from typing import Final

import msgspec
from rich.console import Console

WIDTH_WITHOUT_TERMINAL: Final = 140


def console() -> Console:
    """Standard output; wide enough for our tables when it is no terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def messages() -> Console:
    """Standard error: progress and remarks, so that standard output stays what was asked for."""
    return Console(stderr=True, highlight=False)


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line of standard output."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def human_bytes(nbytes: float) -> str:
    """A size for people: `"320 GiB"`, `"32 KiB"`, `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if nbytes == int(nbytes) else f"{nbytes:,.1f} {unit}"
