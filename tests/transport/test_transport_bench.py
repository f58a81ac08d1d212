"""The benchmark of the transports runs, and tells what it found in the promised form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.namespaces import unavailable
from bench.transport_cases.link_cases import codec_case, link_case
from bench.transport_cases.shaped_link import shaped_link

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_a_quick_run_gives_one_object_a_case() -> None:
    command = [sys.executable, "bench/transport.py", "--json", "--quick", "--case", "kernels", "--case", "latency"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = {str(case["name"]): case for case in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {
        "crc64",
        "fp8_quantise",
        "fp8_dequantise",
        "notification_64B",
        "put_4KiB_with_notification",
        "put_4KiB_with_notification_apart",
    }
    assert found["crc64"]["ours_gbps"] > 0
    for case in found.values():
        assert {"reference", "ratio", "need", "ok", "note"} <= set(case)
    put, apart = found["put_4KiB_with_notification"], found["put_4KiB_with_notification_apart"]
    assert put["ours_us"] > 0 and put["reference_us"] == found["notification_64B"]["ours_us"]
    assert apart["ours_us"] > 0 and apart["reference_us"] > 0


@pytest.mark.root
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_hand_over_crosses_a_shaped_link_no_faster_than_the_link() -> None:
    with shaped_link() as link:
        case = link_case(link, 1_000, slots=2, rounds=1)
    assert case.name == "link_1Gbps_layer_pipelining"
    # But for what fits the bucket and the buffers at the end of it.
    assert 0 < case.ours < 1.3
    assert 0 < case.reference_value < 1.0


@pytest.mark.root
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_codec_is_chosen_for_a_slow_link_and_the_reason_is_told() -> None:
    with shaped_link() as link:
        case = codec_case(link, 100, slots=1, rounds=1)
    assert case.name == "link_0.1Gbps_codec"
    assert 0 < case.reference_value < 1.3
    assert "fp8_e4m3 over a link of" in case.note
