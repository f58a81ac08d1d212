"""When is a process ready: when its `/healthz` answers 200.

Asked over HTTP because that is what an operator and an orchestrator would do. A process that ends first is an error
with its last lines; so is one that takes too long.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp

from kv_services.launch.errors import ProcessExitedError, ProcessNotReadyError
from kv_services.launch.processes import ManagedProcess, ProcessState

_POLL_S: Final = 0.05
_POLL_MAX_S: Final = 0.4
_REQUEST_S: Final = 5.0


async def wait_ready(process: ManagedProcess, url: str, timeout_s: float, tail: Callable[[], str]) -> None:
    """Wait until `url` + `/healthz` answers 200.

    Args:
        process: the process that serves it.
        url: root of its HTTP server.
        timeout_s: seconds to wait.
        tail: gives the last lines of its output, for the error.

    Raises:
        ProcessExitedError: it ended.
        ProcessNotReadyError: the time is over.
    """
    last = ["no answer yet"]
    exited = asyncio.ensure_future(process.wait())
    asking = asyncio.ensure_future(_ask(url, last))
    try:
        await asyncio.wait((exited, asking), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if exited.done():
            raise ProcessExitedError(node=process.name, status=exited.result(), tail=tail())
        if not asking.done():
            raise ProcessNotReadyError(node=process.name, seconds=timeout_s, last=last[0], tail=tail())
        asking.result()
        if process.state is ProcessState.STARTING:
            process.state = ProcessState.READY
    finally:
        for job in (exited, asking):
            job.cancel()
        await asyncio.gather(exited, asking, return_exceptions=True)


async def _ask(url: str, last: list[str]) -> None:
    pause = _POLL_S
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(f"{url}/healthz") as response:
                    if response.status == 200:
                        return
                    last[0] = f"/healthz answers {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                last[0] = f"/healthz: {type(error).__name__}"
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_MAX_S)
