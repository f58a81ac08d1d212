"""The benchmark of the measured claim: both sides say the same tokens, and what it tells is judged as it should be."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.claim_cases.figures import Measured, differing, faster_than_wire, rows, wire_ms
from bench.claim_cases.questions import make_questions
from bench.claim_cases.sides import Answered, Held, Round
from kv_services.engine.byte_tokenizer import ByteTokenizer
from kv_services.launch.cluster import sweep_abandoned
from tests.integration.helpers_integration import until
from tests.soak.wires import unavailable

ROOT = Path(__file__).resolve().parents[2]
REASON = unavailable()
NEEDS_ROOT = [
    pytest.mark.root,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ANSWER = Answered(
    tokens=[b"a", b"b"], first_ms=100.0, nbytes=10_000_000, handover_ms=90.0, sending_ms=90.0, decode_first_ms=95.0
)


def side(answer: Answered, held: Held, wall_s: float = 1.0) -> Measured:
    """A run of four requests that all went alike."""
    return Measured(answer, Round({1: answer}, 1.0), [Round({2: answer, 3: answer}, wall_s, [held])], 0, {"x": 1.0})


NAIVE = side(ANSWER, Held(2, 200_000))


def better(times: float) -> Measured:
    """A side whose every figure is so many times better."""
    answer = Answered(
        ANSWER.tokens,
        ANSWER.first_ms / times,
        int(ANSWER.nbytes / times),
        ANSWER.handover_ms / times,
        ANSWER.sending_ms,
        ANSWER.decode_first_ms / times,
    )
    return side(answer, Held(2, int(200_000 / times)), 1 / times)


@pytest.mark.parametrize(("times", "missed"), [(16, 0), (10, 1), (4, 6), (2, 7), (1, 8)])
def test_a_row_is_met_from_its_ratio_on_and_not_before(times: float, missed: int) -> None:
    cases = list(rows(better(times), NAIVE, 2, 1_000))
    assert len(cases) == 8
    assert all(case.ratio == pytest.approx(times, rel=0.01) for case in cases), cases
    assert sum(not case.ok for case in cases) == missed


def test_without_a_link_nothing_is_required() -> None:
    assert all(case.ok and not case.need for case in rows(NAIVE, NAIVE, 2, None))


def test_kv_is_counted_for_each_request_that_is_live_on_average() -> None:
    assert Round({}, 1.0, [Held(0, 7), Held(1, 100), Held(3, 140)]).held_per_live == 60
    assert Round({}, 1.0, [Held(0, 0)]).held_per_live == 0


def test_other_tokens_none_and_missing_ones_differ() -> None:
    assert differing(NAIVE, NAIVE) == []
    other = dataclasses.replace(ANSWER, tokens=[b"a", b"c"])
    nothing = dataclasses.replace(ANSWER, tokens=[])
    assert differing(dataclasses.replace(NAIVE, first=other), NAIVE) == [0]
    assert differing(dataclasses.replace(NAIVE, first=nothing), dataclasses.replace(NAIVE, first=nothing)) == [0]
    assert differing(NAIVE, dataclasses.replace(NAIVE, rounds=[])) == [2, 3]


def test_what_came_faster_than_the_wire_is_found() -> None:
    assert wire_ms(10_000_000, 1_000) == 80
    assert faster_than_wire(NAIVE, 1_000, 0) == []
    assert len(faster_than_wire(NAIVE, 800, 0)) == 4
    assert faster_than_wire(NAIVE, 800, 1_000_000) == []


def test_questions_are_the_same_in_every_run_and_differ_after_what_they_share() -> None:
    encode = ByteTokenizer().encode_chat
    made = make_questions(encode, 24, 600, 90)
    assert made == make_questions(encode, 24, 600, 90)
    prompts = [tuple(encode(chat)) for chat in made.chats]
    assert len(set(prompts)) == 24 and max(map(len, prompts)) == made.longest
    assert len({prompt[:600] for prompt in prompts}) == 1
    assert all(made.shared + 80 < len(prompt) < made.shared + 300 for prompt in prompts)


def marked(mark: str) -> Iterator[str]:
    """Command lines of processes that carry the mark."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended meanwhile


@pytest.fixture
def mark() -> str:
    return f"KV_CLAIM_TEST={uuid.uuid4().hex}"


def start(mark: str, *arguments: str) -> "subprocess.Popen[str]":
    name, _, value = mark.partition("=")
    return subprocess.Popen(
        [sys.executable, "bench/claim.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, name: value},
    )


class TestRuns:
    pytestmark = NEEDS_ROOT

    def test_a_quick_run_gives_every_row_and_the_same_tokens(self, mark: str) -> None:
        out, told = start(mark, "--quick", "--json").communicate(timeout=240)
        report = json.loads(out)
        cases = {case["name"]: case for case in report["cases"]}
        assert len(cases) == 9 and all(case["need"] for case in cases.values()), told
        assert "12 of 12" in told.splitlines()[-1]
        assert all(case["ours"] > 0 and case["reference_value"] > 0 for case in cases.values())
        # A link is no faster than itself, and less of what is shared is moved than of what is not.
        assert cases["link in use"]["ours"] < 1.3
        assert cases["bytes of KV moved per request"]["ratio"] > 3
        assert not list(marked(mark))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    async def test_whatever_ends_a_run_its_processes_end_with_it(self, number: signal.Signals, mark: str) -> None:
        run = start(mark, "--quick", "--rounds", "2", "--max-tokens", "2000")

        async def both_run() -> bool:
            lines = list(marked(mark))
            assert run.poll() is None
            return all(any(name in line for line in lines) for name in ("naive.py prefill", "kv-node"))

        async def nothing_runs() -> bool:
            return not list(marked(mark))

        await until(both_run, lambda: str(list(marked(mark))))
        run.send_signal(number)
        run.communicate(timeout=60)
        assert run.returncode == (130 if number is signal.SIGINT else -9)
        await until(nothing_runs, lambda: str(list(marked(mark))))
        sweep_abandoned()  # the folder of a launcher that was killed is for the next one to remove
