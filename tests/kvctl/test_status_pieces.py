"""`kvctl status` says which nodes hold which pieces of a request that is larger than a node."""

import msgspec
from rich.console import Console

from kv_services.config import ClusterConfig
from kv_services.kvctl.status import NodeStatus, as_object, render
from kv_services.launch import PortReservation, local_config
from kv_services.status_report import ShardStatus, StatusReport, decode_status, encode_status


def rows(config: ClusterConfig) -> list[NodeStatus]:
    def report(name: str, layers: str) -> StatusReport:
        shard = ShardStatus("cmpl-1", 2, "decode-1", layers, "0-189", 150, 16)
        return decode_status(encode_status(StatusReport(name, "decode", "ready", shards=[shard])))

    return [
        NodeStatus(config.node("decode-1"), report("decode-1", "0-2")),
        NodeStatus(config.node("decode-2"), report("decode-2", "2-3")),
        NodeStatus(config.node("gateway"), None, "does not listen"),
    ]


def test_the_pieces_of_a_request_are_shown_together_with_who_coordinates_it() -> None:
    with PortReservation() as ports:
        config = local_config(ports, prefill=0, decode=2, monitor=False)
    console = Console(width=400, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        console.print(render(config, rows(config)))
    (line,) = [line for line in shown.get().splitlines() if "in pieces" in line]
    assert "cmpl-1 attempt 2, coordinated by decode-1" in line
    assert "decode-1 layers 0-2 tokens 0-189 (16 slots); decode-2 layers 2-3 tokens 0-189 (16 slots)" in line
    told = msgspec.json.decode(msgspec.json.encode(as_object(config, rows(config))))
    assert [len(node.get("shards", [])) for node in told["nodes"]] == [1, 1, 0]
