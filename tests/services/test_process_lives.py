"""A process lives one life after the other, until it is told to stop, whenever that is."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import pytest

from kv_bus.errors import ChildGaveUp
from kv_bus.supervisor import Supervisor
from kv_core.errors import LocalProtocolError
from kv_services import main
from kv_services.config_file import dump_config
from kv_services.launch import PortReservation, local_config
from kv_services.process import keep, live_on, live_once


async def test_a_life_that_was_declared_over_is_followed_by_another() -> None:
    ends = [None, None, 3]

    async def live(stop: asyncio.Event) -> int | None:
        return ends.pop(0)

    assert await live_on("n", live) == 3 and not ends


async def test_no_life_begins_once_the_process_was_told_to_stop() -> None:
    lives = 0

    async def live(stop: asyncio.Event) -> int | None:
        nonlocal lives
        lives += 1
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        # It comes while the life is ending anyway, when nobody waits for it any more.
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await stop.wait()
        return None

    try:
        assert await live_on("n", live) == 0
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert lives == 1


class Port:
    """A child that holds something only one life can have, and takes its time to begin."""

    holders = 0

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._closed = asyncio.Event()
        self._held = False

    async def start(self) -> None:
        await asyncio.sleep(self._takes_s)
        assert Port.holders == 0, "the life before still holds it"
        Port.holders, self._held = Port.holders + 1, True

    async def run(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        Port.holders -= self._held
        self._held = False
        self._closed.set()


class Member(Port):
    """A child that is told soon that the life is over."""

    async def start(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.sleep(0.01)
        raise LocalProtocolError(detail="declared over")


@pytest.mark.parametrize("over", [True, False])
async def test_a_life_that_is_over_before_it_has_started_gives_back_all_and_another_follows(over: bool) -> None:
    said: list[str] = []

    def life(*children: Port) -> Supervisor:
        specs = [keep(str(number), child) for number, child in enumerate(children)]
        return Supervisor("n", specs)

    def living(supervisor: Supervisor, stop: asyncio.Event) -> Coroutine[None, None, int | None]:
        return live_once(
            supervisor,
            stop,
            ready=lambda: said.append("ready"),
            ending=lambda: said.append("ending"),
            is_over=lambda: over,
        )

    first = living(life(Member(0), Port(0.1), Port(0)), asyncio.Event())
    if not over:
        with pytest.raises(ChildGaveUp, match="declared over"):
            await first
        assert Port.holders == 0 and said == []
        return
    assert await first is None
    assert Port.holders == 0 and said == []
    stop = asyncio.Event()
    second = live_once(life(Port(0)), stop, ready=stop.set, ending=lambda: said.append("ending"), is_over=lambda: False)
    assert await second == 0
    assert Port.holders == 0 and said == ["ending"]


def test_missing_keys_are_told_with_what_makes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sys.getswitchinterval()
    with PortReservation() as ports:
        file = tmp_path / "cluster.toml"
        file.write_text(dump_config(local_config(ports, prefill=0, decode=1)))
    try:
        with pytest.raises(SystemExit) as caught:
            main.monitor(["--config", str(file), "--node", "monitor"])
    finally:
        sys.setswitchinterval(before)
    assert caught.value.code == 1
    assert "state/keys: No such file or directory" in caplog.text and "kvctl keys init" in caplog.text
