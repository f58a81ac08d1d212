"""A process lives one life after the other, until it is told to stop, whenever that is."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kv_services import main
from kv_services.config_file import dump_config
from kv_services.launch import PortReservation, local_config
from kv_services.process import live_on


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
