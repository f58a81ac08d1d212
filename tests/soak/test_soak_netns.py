"""The soak over a network of namespaces, where packets are lost: what partitions cost, and that nothing of it stays."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.helpers_integration import until
from tests.soak.wires import Wires, unavailable

ROOT = Path(__file__).resolve().parents[2]
REASON = unavailable()

pytestmark = [
    pytest.mark.root,
    pytest.mark.integration,
    pytest.mark.timeout(500),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@dataclass
class Run:
    """One run of `python -m tests.soak --netns`, whose processes are known by a mark."""

    process: asyncio.subprocess.Process
    mark: str

    def processes(self) -> dict[int, str]:
        """Command lines of all that carry the mark."""
        return dict(_marked(self.mark))


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended meanwhile


async def start(folder: Path, *arguments: str) -> Run:
    mark = f"KV_SOAK_TEST={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak", "--netns", "--clients", "3", "--logs", str(folder / "logs"), *arguments,
        cwd=ROOT, env={**os.environ, name: value, "TMPDIR": str(folder)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    return Run(process, mark)


def network() -> tuple[str, str]:
    """Devices and namespaces that are here."""
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return links, names


async def test_lost_packets_and_dead_machines_cost_time_and_never_a_wrong_token(tmp_path: Path) -> None:
    kinds = Wires().faults
    before = network()
    run = await start(tmp_path, "--minutes", "0.5", "--seed", "4", "--gap", "1", "--kinds", ",".join(kinds))
    out, _ = await run.process.communicate()
    told = out.decode()
    assert run.process.returncode == 0, told
    report = json.loads(told.splitlines()[-1])
    assert report["wrong"] == report["ended"] == report["leaked"] == report["leftovers"] == 0, told
    assert set(report["faults"]) == set(kinds) and not report["skipped"], told
    assert report["right"] > 20, told
    assert not run.processes()
    assert "uplink" not in before[0] and network() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_whatever_ends_a_run_its_processes_and_its_network_end_with_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = await start(tmp_path)

    async def nodes_run() -> bool:
        return sum("kv-node" in line for line in run.processes().values()) >= 2

    await until(nodes_run, lambda: str(run.processes()))
    os.kill(run.process.pid, number)
    await run.process.communicate()
    assert run.process.returncode != 0

    async def nothing_runs() -> bool:
        return not run.processes()

    await until(nothing_runs, lambda: str(run.processes()))

    async def nothing_is_left() -> bool:
        links, names = network()
        return "uplink" not in links and "kv-decode" not in names

    await until(nothing_is_left, lambda: str(network()))  # the kernel takes a network down when it has the time
