"""`kvctl up` runs a file's processes in the foreground and ends them all, however it is ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_services.config_file import dump_config, load_config
from kv_services.launch import PortReservation, local_config
from tests.kvctl.test_launch_cluster import ended

UP = """
import sys
from pathlib import Path
from kv_services.kvctl import up
from kv_core.errors import KVError
from tests.kvctl.test_launch_cluster import dummies

try:
    sys.exit(up.run(Path(sys.argv[1]), None, command=dummies(decode_1=" ".join(sys.argv[2:]))))
except KVError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with PortReservation() as ports:
        path = tmp_path / "cluster.toml"
        path.write_text(dump_config(local_config(ports, prefill=1, decode=1)))
        yield path


@contextmanager
def started(file: Path, *mode: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(file), *mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_output_has_names_before_it_and_ctrl_c_stops_all_in_order(file: Path) -> None:
    with started(file) as up:
        seen = read_until(up, "4 processes are ready")
        pids = children(up.pid)
        assert len(pids) == 4
        assert " decode-1 | dummy plain on " in seen
        assert "    kvctl | gateway ready at http://127.0.0.1:" in seen
        up.send_signal(signal.SIGINT)
        seen = up.stdout.read() if up.stdout else ""
        assert up.wait(60) == 130
    order = [line.split("|")[1].split()[0] for line in seen.splitlines() if "ended with status 0" in line]
    assert order == ["gateway", "prefill-1", "decode-1", "monitor"]
    assert "gateway | dummy stopped" in seen
    assert all(map(ended, pids))


def test_a_process_that_dies_is_reported_and_the_others_go_on(file: Path) -> None:
    with started(file) as up:
        read_until(up, "4 processes are ready")
        port = str(load_config(file).node("decode-1").http_port).encode()
        victim = next(pid for pid in children(up.pid) if port in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)
        read_until(up, "decode-1 ended with status -9")
        assert len(children(up.pid)) == 3
        up.send_signal(signal.SIGTERM)
        read_until(up, "monitor ended with status 0")
        assert up.wait(60) == 143


def test_up_ends_with_1_when_every_process_is_gone(file: Path) -> None:
    with started(file) as up:
        read_until(up, "4 processes are ready")
        for pid in children(up.pid):
            os.kill(pid, signal.SIGKILL)
        assert up.wait(60) == 1


def test_a_process_that_does_not_start_ends_up_with_its_last_lines(file: Path) -> None:
    with started(file, "exit", "3") as up:
        seen = read_until(up, "error: ")
        pids = children(up.pid) if Path(f"/proc/{up.pid}").exists() else []
        assert "decode-1 ended with status 3 before it was ready" in seen
        assert up.wait(60) == 1
    assert all(map(ended, pids))


def test_a_second_ctrl_c_does_not_wait(file: Path) -> None:
    with started(file, "ignore-term") as up:
        read_until(up, "4 processes are ready")
        up.send_signal(signal.SIGINT)
        read_until(up, "prefill-1 ended with status 0")
        up.send_signal(signal.SIGINT)
        read_until(up, "decode-1 ended with status -9")
        assert up.wait(60) == 130


def test_one_cluster_is_not_run_twice(file: Path) -> None:
    with started(file) as up:
        read_until(up, "4 processes are ready")
        with started(file) as second:
            read_until(second, "is already up")
            assert second.wait(60) == 1
        assert len(children(up.pid)) == 4


@pytest.mark.parametrize(("then", "status"), [(signal.SIGINT, 130), (None, 1)], ids=["interrupted", "a process dies"])
def test_output_that_nobody_reads_any_more_ends_up_in_order(
    file: Path, then: signal.Signals | None, status: int
) -> None:
    with started(file) as up:
        read_until(up, "4 processes are ready")
        pids = children(up.pid)
        assert up.stdout is not None
        up.stdout.close()
        if then is not None:
            up.send_signal(then)
        else:
            # What it says of this goes nowhere, which it notices.
            os.kill(pids[0], signal.SIGKILL)
        assert up.wait(60) == status
    assert all(map(ended, pids))
