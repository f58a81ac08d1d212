"""A cluster that grows from 1+1 to 3+3 and shrinks again while it serves: no request fails, no block is lost that had
another holder, and what is said to be safe to stop is."""

import asyncio
import contextlib
import functools
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kv_services.config import DiskTierSection, RemoteTierSection, TiersSection
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.integration.helpers_integration import BLOCK, DEADLINE_S, MODEL, Fabric, prompt, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.asyncio]

KEY = "the key of an operator"
FIRST = ("gateway", "prefill-1", "decode-1")
LATER = ("prefill-2", "decode-2", "prefill-3", "decode-3")
SHARED = 160
COUNT = 24


@contextlib.asynccontextmanager
async def small_cluster(slots: int = 256, tiers: TiersSection | None = None) -> AsyncIterator[Fabric]:
    """Three of each kind are in the file; one of each runs at first."""
    with PortReservation() as ports:
        config = local_config(ports, prefill=3, decode=3, slots=slots, monitor=False, model=MODEL, tiers=tiers)
        section = msgspec.structs.replace(config.cluster, operator_keys=[KEY])
        config = msgspec.structs.replace(config, cluster=section)
        cluster = LocalCluster(config, start=FIRST, stop_grace_s=DEADLINE_S)
        async with cluster:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
                fabric = Fabric(cluster, session)
                for name in FIRST:
                    await fabric.all_alive(name, set(FIRST) - {name})
                yield fabric
    assert cluster.leftovers == []


class Load:
    """Clients that ask one after the other until told to stop; every answer is held against the oracle."""

    def __init__(self, fabric: Fabric, clients: int) -> None:
        self._fabric = fabric
        self._stopping = False
        self.right = 0
        self.wrong: list[str] = []
        self.used: dict[str, int] = {}
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(clients)]

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._stopping:
            turn += 1
            tokens = prompt(1000 * number + turn, SHARED + 20 + number, SHARED if turn % 3 == 0 else 0)
            ask = self._fabric.stream if turn % 2 else self._fabric.ask
            answer = await ask(tokens, COUNT)
            if answer.is_right(tokens, COUNT):
                self.right += 1
                for role in ("prefill_node", "decode_node"):
                    node = answer.fabric.get(role) or ""
                    self.used[node] = self.used.get(node, 0) + 1
            else:
                self.wrong.append(str(answer))

    async def more(self, count: int) -> None:
        goal = self.right + count

        async def enough() -> bool:
            return self.right >= goal or bool(self.wrong)

        await until(enough)
        assert not self.wrong, self.wrong[:3]

    async def uses(self, names: set[str]) -> None:
        self.used.clear()

        async def all_used() -> bool:
            return bool(self.wrong) or names <= set(self.used)

        await until(all_used, lambda: f"{names} not among {self.used}")
        assert not self.wrong, self.wrong[:3]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        assert not self.wrong, self.wrong[:3]

    async def __aenter__(self) -> "Load":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nobody asks a cluster that is being taken down, also when the test failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def is_dead(fabric: Fabric, name: str) -> bool:
    return (await fabric.status("gateway")).members[name] == "dead"


async def kvctl(*args: str) -> tuple[int, str]:
    program = Path(sys.executable).with_name("kvctl")
    process = await asyncio.create_subprocess_exec(
        str(program), *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode or 0, output.decode()


async def test_a_cluster_grows_and_shrinks_under_load_and_no_request_fails() -> None:
    async with small_cluster() as fabric, Load(fabric, clients=4) as load:
        file = str(fabric.cluster.config_file)
        await load.more(8)
        await asyncio.gather(*(fabric.cluster.restart(name) for name in LATER))
        for name in FIRST:
            await fabric.all_alive(name, set(LATER) - {name})
        await load.uses({"decode-2", "decode-3"})

        # What is idle is shared: the newcomers take theirs, and a second time there is nothing left to move.
        status, text = await kvctl("rebalance", file, "--watch")
        assert status == 0, text
        await load.more(8)

        # Back again, from nodes that are at work.
        for name in ("decode-1", "decode-2", "prefill-1", "prefill-2"):
            status, text = await kvctl("drain", file, name)
            assert status == 0 and f"{name} is safe to stop" in text, text
            report = await fabric.status(name)
            assert report.state == "draining" and report.moving is not None and report.moving.safe_to_stop
            assert report.moving.open == 0
            counts = report.moving
            assert counts.elsewhere + counts.moved + counts.left == counts.total
            assert await fabric.cluster.stop(name) == 0
            # It said that it left: nobody waits for its silence to be long enough.
            await until(functools.partial(is_dead, fabric, name))
            await load.more(4)
        assert "member died node=decode-1" in fabric.cluster.logs("gateway")
        await load.stop()
        await fabric.settle(["gateway", "prefill-3", "decode-3"])


async def test_a_drained_nodes_prefixes_are_found_at_the_node_that_took_them() -> None:
    async with small_cluster() as fabric:
        file = str(fabric.cluster.config_file)
        await fabric.cluster.restart("decode-2")
        for name in FIRST:
            await fabric.all_alive(name, {"decode-2"})
        await fabric.cluster.stop("prefill-1")
        prompts = [prompt(seed, 100) for seed in range(6)]
        for one in prompts:
            answer = await fabric.ask(one, 4)
            assert answer.is_right(one, 4), answer
        before = [await fabric.status(name) for name in ("decode-1", "decode-2")]
        held = sum(report.slots.cached for report in before if report.slots)
        assert held >= len(prompts) * (100 // BLOCK)
        status, text = await kvctl("drain", file, "decode-1", "--json")
        assert status == 0, text
        last = msgspec.json.decode(text.splitlines()[-1])["decode-1"]
        assert last["left"] == 0 and last["moved"] > 0 and last["safe_to_stop"]
        assert await fabric.cluster.stop("decode-1") == 0
        (report,) = await fabric.settle(["decode-2"])
        assert report.slots is not None and report.slots.cached == held
        for one in prompts:
            answer = await fabric.ask(one, 4)
            assert answer.is_right(one, 4), answer
            assert answer.cached >= 100 // BLOCK * BLOCK, answer


async def test_a_drain_leaves_nothing_unread_that_lies_in_slower_tiers(tmp_path: Path) -> None:
    """The disk's blocks move or stay in the object store, where the node that is left takes them over."""
    tiers = TiersSection(
        disk=DiskTierSection(size="64 MiB", path=str(tmp_path / "tier")),
        remote=RemoteTierSection(size="64 MiB", url=f"file://{tmp_path}/shared"),
    )
    size = 20 * BLOCK
    async with small_cluster(slots=48, tiers=tiers) as fabric:
        await fabric.cluster.stop("prefill-1")
        prompts = [prompt(seed, size + 1) for seed in range(4)]

        async def all_down(count: int) -> bool:
            below = (await fabric.status("decode-1")).tiers
            return all(name in below and below[name].blocks >= count for name in ("disk", "remote"))

        for number, one in enumerate(prompts, 1):
            answer = await fabric.ask(one, 4)
            assert answer.is_right(one, 4), answer
            # What is pushed out of memory before it is written would be missing below.
            await until(functools.partial(all_down, 20 * number))
        await fabric.cluster.restart("decode-2")
        for name in ("gateway", "decode-1"):
            await fabric.all_alive(name, {"decode-2"})
        status, text = await kvctl("drain", str(fabric.cluster.config_file), "decode-1", "--json")
        assert status == 0, text
        last = msgspec.json.decode(text.splitlines()[-1])["decode-1"]
        assert last["total"] >= 4 * 20 > 48 and last["left"] == 0, last
        # 48 slots of the other node take two prompts of the four.
        assert last["moved"] >= 2 * 20 and last["elsewhere"] >= 20, last
        assert await fabric.cluster.stop("decode-1") == 0

        async def taken_over() -> bool:
            remote = (await fabric.status("decode-2")).tiers.get("remote")
            return remote is not None and remote.blocks >= 4 * 20

        await until(taken_over)
        for one in prompts:
            answer = await fabric.ask(one, 4)
            # One load is of a quarter of the slots at most.
            assert answer.is_right(one, 4) and answer.cached >= 12 * BLOCK, answer
        await fabric.settle(["gateway", "decode-2"])


async def test_a_node_that_stays_after_all_takes_work_again_and_may_change_its_role() -> None:
    async with small_cluster() as fabric:
        file = str(fabric.cluster.config_file)
        assert (await kvctl("drain", file, "prefill-1"))[0] == 0
        one = prompt(1, 90)
        answer = await fabric.ask(one, 4)
        assert answer.is_right(one, 4) and not answer.fabric.get("prefill_node"), answer
        assert (await kvctl("drain", file, "prefill-1", "--resume"))[0] == 0
        life = (await fabric.status("prefill-1")).incarnation
        seeds = itertools.count(10)

        async def works() -> bool:
            tokens = prompt(next(seeds), 90)
            answer = await fabric.ask(tokens, 4)
            assert answer.is_right(tokens, 4), answer
            return answer.fabric.get("prefill_node") == "prefill-1"

        await until(works)

        # The only decode node goes on as a prefill node, once the former prefill node decodes.
        assert (await kvctl("role", file, "prefill-1", "decode"))[0] == 0

        async def decodes(name: str) -> bool:
            tokens = prompt(next(seeds), 90)
            answer = await fabric.ask(tokens, 4)
            assert answer.is_right(tokens, 4), answer
            return answer.fabric.get("decode_node") == name

        await until(lambda: decodes("prefill-1"))
        assert (await kvctl("role", file, "decode-1", "prefill"))[0] == 0
        for seed in itertools.islice(seeds, 4):
            tokens = prompt(seed, 90)
            answer = await fabric.ask(tokens, 4)
            assert answer.is_right(tokens, 4), answer
        assert answer.fabric["decode_node"] == "prefill-1" and answer.fabric["prefill_node"] == "decode-1"
        assert (await fabric.status("prefill-1")).incarnation == life
        assert (await fabric.status("prefill-1")).role == "decode"
        status, text = await kvctl("role", file, "gateway", "decode")
        assert status == 1 and "refuses" in text
        await fabric.settle(FIRST)
