"""What an answer tells of itself: what was found, what was moved, and when that is known."""

from kv_core.ids import NodeId
from kv_prefix.placement import Placement
from kv_services.gateway.figures import Figures
from kv_services.gateway.placing import NodeChoice
from kv_services.messages import DecodeReserved, PrefillDone

CHOICE = NodeChoice(Placement(NodeId("d"), 0, 4, 0.0, ""), Placement(NodeId("p"), 0, 4, 0.0, ""))
RESERVED = DecodeReserved("r", 1, 32, 2, b"grant")
DONE = PrefillDone(
    request_id="r",
    epoch=1,
    local_tokens=16,
    pulled_tokens=48,
    computed_tokens=36,
    bytes_moved=4096,
    bytes_pulled=1024,
    units=3,
    retries=0,
    handover_ns=5_000_000,
    transport="shm",
    queued_ns=1_000_000,
    compute_ns=20_000_000,
    tail_ns=300_000,
)


def test_figures_are_awaited_from_asking_the_prefill_node_until_it_has_told() -> None:
    figures = Figures(CHOICE, reserved=RESERVED)
    assert not figures.awaited
    figures.prefill_asked = True
    assert figures.awaited
    figures.prefill = DONE
    assert not figures.awaited


def test_what_was_found_is_told_by_the_prefill_node_and_until_then_by_the_decode_node() -> None:
    figures = Figures(CHOICE, reserved=RESERVED)
    assert figures.usage(100, 7).cached_tokens == 32
    figures.prefill = DONE
    assert figures.usage(100, 7).cached_tokens == 64
    assert figures.usage(50, 7).cached_tokens == 50
    told = figures.timings()
    assert (told.prefill_node, told.decode_node, told.kv_bytes_moved, told.transport) == ("p", "d", 4096, "shm")
    assert (told.prefill_ns, told.handover_ns, told.tail_ns) == (21_000_000, 5_000_000, 300_000)


def test_an_answer_that_no_prefill_node_worked_for_says_so() -> None:
    assert Figures(CHOICE, reserved=RESERVED).timings().prefill_node is None
    assert Figures(coordinator="d-2", retries=["it died"]).timings().attempts == 2
    assert Figures(coordinator="d-2").timings().decode_node == "d-2"
