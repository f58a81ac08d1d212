"""Ctrl-C, SIGTERM and SIGHUP become a cancellation of the main task; a second one asks for haste, never for less order.

The handlers stay until everything is stopped, so no signal can interrupt the cleaning up.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run `main(hurry)` on a loop of its own and return its exit status.

    The first signal cancels `main`, which cleans up in its `finally` blocks; each further one sets `hurry`, for those
    who wait in them. Returns 128 + the signal's number if one ended it.
    """
    received: list[int] = []

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        hurry = asyncio.Event()

        def on_signal(number: int) -> None:
            received.append(number)
            if len(received) > 1:
                hurry.set()
            elif task is not None:
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await main(hurry)
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]

    with asyncio.Runner() as runner:
        return runner.run(guarded())


async def finish(cleaning: Coroutine[Any, Any, None], hurry: asyncio.Event) -> None:
    """Run `cleaning` to its end; being cancelled meanwhile only sets `hurry`, and is passed on afterwards."""
    task = asyncio.create_task(cleaning)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
            hurry.set()
    task.result()
    if cancelled:
        raise asyncio.CancelledError
