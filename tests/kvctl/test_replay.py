"""Replaying traces: against plain caches, and against what a cache of any kind cannot do."""

import itertools
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kv_core.errors import MissingExtraError
from kv_prefix.errors import UnknownPolicyError
from kv_services.kvctl import app
from kv_services.kvctl.replay import plot
from kv_services.kvctl.replay.engine import Setup, replay
from kv_services.kvctl.replay.errors import ReplayRequestError, TraceError
from kv_services.kvctl.replay.trace import TraceRequest, read_trace, write_trace
from kv_services.kvctl.replay.workload import KINDS, generate


def trace(kind: str, num_requests: int = 300, seed: int = 7) -> list[TraceRequest]:
    return list(generate(kind, num_requests, seed))


def plain_hits(requests: Sequence[TraceRequest], capacity: int, *, lru: bool) -> int:
    """The published rule, written down: the unbroken run that is present; touch or insert; evict down to capacity."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block_id in request.hash_ids:
            if block_id not in cache:
                break
            hits += 1
        for block_id in request.hash_ids:
            if block_id in cache and lru:
                cache.move_to_end(block_id)
            cache.setdefault(block_id)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [60, 400, 2_500])
@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("kind", ["chat", "scan"])
def test_one_pool_has_exactly_the_hits_of_the_published_rule(kind: str, policy: str, capacity: int) -> None:
    requests = trace(kind)
    outcome = replay(requests, Setup(policy=policy, capacity_blocks=capacity))
    assert (outcome.hits, outcome.order) == (plain_hits(requests, capacity, lru=policy == "lru"), "any")


@pytest.mark.parametrize("policy", ["adaptive", "lru", "s3fifo", "lfu"])
def test_with_room_for_all_every_block_seen_before_is_a_hit(policy: str) -> None:
    requests = trace("chat")
    distinct = len({block_id for request in requests for block_id in request.hash_ids})
    outcome = replay(requests, Setup(policy=policy, capacity_blocks=distinct, order="tail"))
    assert (outcome.hits, outcome.evicted) == (outcome.references - distinct, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "capacity"), [(31, 250), (32, 900)])
def test_the_default_policy_is_nowhere_worse_than_lru(kind: str, seed: int, capacity: int) -> None:
    """Traffic that its constants were not chosen by; no more than 0.002 is ever given away."""
    requests = trace(kind, 500, seed)
    rates = {
        policy: replay(requests, Setup(policy=policy, capacity_blocks=capacity, order="any")).hit_rate
        for policy in ("adaptive", "lru")
    }
    assert rates["adaptive"] >= rates["lru"] - 0.002


def best_hits(requests: Sequence[TraceRequest], capacity: int) -> int:
    """The most hits that any choice of what to keep can give, by trying them all."""
    best = {frozenset[int](): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            run = next((i for i, one in enumerate(request.hash_ids) if one not in kept), len(request.hash_ids))
            there = kept | set(request.hash_ids)
            for chosen in itertools.combinations(sorted(there), min(capacity, len(there))):
                now = frozenset(chosen)
                after[now] = max(after.get(now, 0), hits + run)
        best = after
    return max(best.values())


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 4))
def test_clairvoyant_is_what_no_choice_exceeds(texts: list[list[int]], capacity: int) -> None:
    known: dict[tuple[int, ...], int] = {}
    ids = [tuple(known.setdefault(tuple(text[: i + 1]), len(known)) for i in range(len(text))) for text in texts]
    requests = [TraceRequest(0, 512 * len(one), 1, one) for one in ids]
    assert replay(requests, Setup(policy="clairvoyant", capacity_blocks=capacity)).hits == best_hits(requests, capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_exceeds_clairvoyant(kind: str) -> None:
    requests = trace(kind, 200, 5)
    bound = replay(requests, Setup(policy="clairvoyant", capacity_blocks=250)).hits
    for policy in ("adaptive", "lru", "fifo", "lfu", "s3fifo"):
        assert replay(requests, Setup(policy=policy, capacity_blocks=250, order="any")).hits <= bound


def test_the_default_policy_keeps_what_is_popular_through_scans() -> None:
    requests = trace("scan", 900)
    rates = {
        policy: replay(requests, Setup(policy=policy, capacity_blocks=600, order="tail")).hit_rate
        for policy in ("adaptive", "lru")
    }
    assert rates["adaptive"] > rates["lru"] + 0.02


def test_a_lower_tier_finds_what_memory_had_to_give_up() -> None:
    requests = trace("chat")
    distinct = len({block_id for request in requests for block_id in request.hash_ids})
    memory = Setup(capacity_blocks=250, order="tail")
    alone = replay(requests, memory)
    with_disk = replay(requests, replace(memory, disk_blocks=distinct))
    assert alone.hits < with_disk.hits == with_disk.references - distinct
    assert with_disk.hits_disk == with_disk.hits - alone.hits
    small = replay(requests, replace(memory, disk_blocks=400, remote_blocks=distinct))
    assert small.hits == with_disk.hits and 0 < small.hits_disk < with_disk.hits_disk
    assert small.hits_remote > 0


@pytest.mark.parametrize("router", ["kv_aware", "round_robin", "power_of_two"])
def test_load_spreads_though_all_requests_begin_alike(router: str) -> None:
    requests = [TraceRequest(i, 512 * 8, 1, (0, *range(1 + 7 * (i % 150), 8 + 7 * (i % 150)))) for i in range(600)]
    outcome = replay(requests, Setup(capacity_blocks=400, nodes=10, router=router))
    assert outcome.load_max_over_mean <= 1.5


def test_affinity_finds_more_than_taking_turns() -> None:
    requests = trace("chat", 400)
    aware, turns = (
        replay(requests, Setup(capacity_blocks=300, nodes=4, router=router)) for router in ("kv_aware", "round_robin")
    )
    assert aware.hit_rate > turns.hit_rate + 0.1


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = trace("agents", 30)
    assert write_trace(tmp_path / "t.jsonl", requests) == 30
    assert read_trace(tmp_path / "t.jsonl") == requests


@pytest.mark.parametrize("kind", KINDS)
def test_no_id_of_a_generated_trace_follows_two(kind: str, tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", trace(kind, 60))
    assert len(read_trace(tmp_path / "t.jsonl")) == 60


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    code = (
        "import hashlib, msgspec; from kv_services.kvctl.replay.workload import KINDS, generate\n"
        "print(hashlib.sha256(msgspec.json.encode([list(generate(k, 40, 3)) for k in KINDS])).hexdigest())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert trace("chat", 40, 3) != trace("chat", 40, 4)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "malformed"),
        ('{"timestamp": 1}', "missing required"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', ">= 0"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [5, 1]}', "block 1 follows 5 here"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(line: str, reason: str, tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}'
    (tmp_path / "t.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(TraceError, match=f"line 3: .*{reason}"):
        read_trace(tmp_path / "t.jsonl")


def test_a_trace_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        write_trace(tmp_path, [])


def test_options_that_do_not_go_together_are_refused() -> None:
    requests = trace("chat", 20)
    with pytest.raises(ReplayRequestError, match="longest request"):
        replay(requests, Setup(capacity_blocks=2))
    with pytest.raises(ReplayRequestError, match="tiers"):
        replay(requests, Setup(order="any", disk_blocks=1))
    for setup in (Setup(nodes=2), Setup(order="tail"), Setup(disk_blocks=9)):
        with pytest.raises(ReplayRequestError, match="one pool"):
            replay(requests, replace(setup, policy="clairvoyant"))
    with pytest.raises(UnknownPolicyError):
        replay(requests, Setup(policy="belady"))
    with pytest.raises(UnknownPolicyError):
        replay(requests, Setup(router="nearest"))
    with pytest.raises(ReplayRequestError, match="known are chat"):
        list(generate("nothing", 1, 1))


def test_an_empty_trace_has_no_hits() -> None:
    outcome = replay([], Setup())
    assert (outcome.hits, outcome.hit_rate, outcome.load_max_over_mean) == (0, 0.0, 1.0)


def test_the_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    path = str(tmp_path / "t.jsonl")
    made = runner.invoke(app, ["workload", "documents", path, "--requests", "60", "--json"])
    assert json.loads(made.stdout)["requests"] == 60, made.output
    arguments = ["replay", path, "--policy", "lru", "--policy", "adaptive", "--capacity-blocks", "500"]
    told = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert [(run["policy"], run["order"]) for run in told["runs"]] == [("lru", "any"), ("adaptive", "tail")]
    shown = runner.invoke(app, arguments)
    assert shown.exit_code == 0 and f"{told['runs'][0]['hits']:,}" in shown.output
    refused = runner.invoke(app, ["replay", path, "--capacity-blocks", "1"])
    assert refused.exit_code == 1 and "longest request" in refused.output


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "t.jsonl", tmp_path / "curve.png"
    write_trace(path, trace("documents", 60))
    done = CliRunner().invoke(app, ["replay", str(path), "--capacity-blocks", "800", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["replay", str(path), "--plot", str(tmp_path / "curve.nothing")])
    assert refused.exit_code == 1 and "--plot" in refused.output


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"kv-services\[plot\]"):
        plot.require_plotting()
