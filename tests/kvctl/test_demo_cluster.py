"""The demo with the real model in real processes: every token the same, and nothing left, however it is ended."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_services.launch.cluster import sweep_abandoned
from tests.kvctl.test_launch_cluster import short_tmp

__all__ = ["short_tmp"]

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(600)]

KVCTL = Path(sys.executable).parent / "kvctl"


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A running demo whose temporary files are in `folder`."""
    process = subprocess.Popen(
        [str(KVCTL), "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def comes(run: "subprocess.Popen[str]", moment: str) -> None:
    """Wait until the demo says that."""
    assert run.stderr is not None
    seen = []
    for line in run.stderr:
        seen.append(line)
        if moment in line:
            return
    pytest.fail(f"{moment!r} never came: {seen}")


def marked(folder: Path) -> list[str]:
    """The processes that were started with temporary files in that folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_demo_answers_moves_shares_and_says_the_same_as_one_process(short_tmp: Path) -> None:
    with demo(short_tmp, "--requests", "3", "--json") as run:
        shown, told = run.communicate()
        assert run.returncode == 0, told
    last = json.loads(shown.splitlines()[-1])
    assert {name: last[name] for name in ("requests", "identical", "processes", "left_behind")} == {
        "requests": 3,
        "identical": 3,
        "processes": 6,
        "left_behind": 0,
    }
    # At least one of the three found what another one computed, and all KV of the first had to be moved.
    assert last["prefix_hit_tokens"] >= 300
    assert last["bytes_moved"] >= 300 * 23_040
    assert "identical to single-process: 3/3" in shown
    assert re.search(r"prefill-[12] │ decode-[12] │ +39\d │", shown)
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting", signal.SIGINT),
        ("decode-1 ready", signal.SIGINT),
        ("request 1 sent", signal.SIGINT),
        ("the same 1 prompts", signal.SIGTERM),
    ],
)
def test_ended_at_any_moment_the_demo_leaves_nothing(short_tmp: Path, moment: str, number: signal.Signals) -> None:
    with demo(short_tmp, "--requests", "1") as run:
        comes(run, moment)
        run.send_signal(number)
        _, told = run.communicate()
        assert run.returncode == 128 + number, told
    assert marked(short_tmp) == []
    assert list(short_tmp.iterdir()) == []


def test_a_killed_demo_takes_its_processes_with_it(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with demo(short_tmp, "--requests", "1") as run:
        comes(run, "decode-1 ready")
        run.kill()
    # Its children hold the other end of no pipe, so they are waited for by looking.
    for _ in range(1200):
        if not marked(short_tmp):
            break
        subprocess.run(["/bin/sleep", "0.05"], check=True)
    assert marked(short_tmp) == []
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp))
    sweep_abandoned()
    assert list(short_tmp.iterdir()) == []


def test_a_model_that_is_not_there_is_an_error_that_names_it(short_tmp: Path) -> None:
    with demo(short_tmp, "--requests", "1", "--model", "/none/model.gguf") as run:
        _, told = run.communicate()
    assert run.returncode == 1
    assert "/none/model.gguf" in told
    assert "Traceback" not in told.splitlines()[-1]
    assert list(short_tmp.iterdir()) == []
