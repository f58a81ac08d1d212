"""Sizes as people write them in the cluster file and on the command line."""

import re
from typing import Annotated, Final

from msgspec import Meta

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?(B|KiB|MiB|GiB|TiB)")

Bytes = Annotated[str, Meta(pattern=r"^[0-9]{1,15}(\.[0-9]{1,6})? ?(B|KiB|MiB|GiB|TiB)$")]
"""A size in a file; `parse_bytes` reads it."""


def parse_bytes(text: str) -> int:
    """The number of bytes that `"512 MiB"`, `"1.5 GiB"` or `"4096 B"` says; binary units only.

    Raises:
        ValueError: anything else.
    """
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; expected a number and one of B, KiB, MiB, GiB, TiB")
    whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3)
    # Integers only: a float would lose bytes above 2**53.
    nbytes: int = int(whole + fraction) * _UNITS[unit] // 10 ** len(fraction)
    return nbytes
