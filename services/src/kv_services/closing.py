"""Closing what consists of parts, one after the other, and all of them though one fails or time runs out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

LAST_S: Final = 0.5
"""What each part has once time has run out: nobody would cut it short any more."""

_log = logging.getLogger(__name__)


async def close_all(*closes: Callable[[], Awaitable[None]]) -> None:
    """Call each in turn; after one that raises or is cancelled the others too, with `LAST_S` for each.

    Raises:
        BaseException: the first that was raised, at the end; the others are logged.
    """
    first: BaseException | None = None
    for close in closes:
        try:
            async with asyncio.timeout(None if first is None else LAST_S):
                await close()
        except BaseException as error:
            if first is not None:
                _log.error("not closed part=%s cause=%s", getattr(close, "__qualname__", close), repr(error))
            first = first or error
    if first is not None:
        raise first
