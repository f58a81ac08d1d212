"""What the collector has to look at: nothing as old as the process, and nothing of a request that is over."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kv_core.testing import LoopClock, run_virtual
from kv_services import garbage
from kv_services.gateway.request_actor import RequestActor
from tests.services.helpers_gateway_world import World


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collection runs by itself, and nothing stays set aside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_what_is_there_when_a_life_begins_is_not_looked_at_again() -> None:
    ring = Ring()
    assert garbage.set_aside() > 10_000
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is not None and len(gc.get_objects()) < 10_000


@pytest.mark.usefixtures("uncollected")
def test_what_a_former_life_left_is_collected_when_the_next_begins() -> None:
    ring = Ring()
    garbage.set_aside()
    gone = weakref.ref(ring)
    del ring
    garbage.set_aside()
    assert gone() is None


@pytest.mark.usefixtures("uncollected")
def test_a_request_that_is_over_is_gone_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the gateway: each would be a hundred objects that only a collection frees."""
    made: list[weakref.ref[RequestActor]] = []
    begin = RequestActor.begin

    def noted(actor: RequestActor) -> None:
        made.append(weakref.ref(actor))
        begin(actor)

    monkeypatch.setattr(RequestActor, "begin", noted)

    async def run(clock: LoopClock) -> list[int]:
        world = World(clock, 1, 1)
        try:
            await world.start()
            answers = [await world.ask() for _ in range(3)]
        finally:
            await world.stop()
        return [len(answer.tokens) for answer in answers]

    assert run_virtual(run) == [1, 1, 1]
    assert len(made) == 3 and [actor() for actor in made] == [None] * 3
