"""Every transport test that says `transport` runs over each of them, and all run on both event loops."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from kv_transport.config import TransportName

REAL_TRANSPORTS: list[TransportName] = ["shm", "tcp"]


@pytest.fixture(params=REAL_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportName:
    name: TransportName = request.param
    return name


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
