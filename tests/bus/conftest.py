"""The carriers that every bus contract runs over."""

import pytest

from tests.bus.helpers_bus import Run, run_world


@pytest.fixture(params=["memory", "zmq", "zmq-stock"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs one scenario in a world of nodes over one carrier."""
    kind: str = request.param
    return lambda scenario: run_world(kind, scenario)
