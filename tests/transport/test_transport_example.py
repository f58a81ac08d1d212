"""The package's example runs as a user would run it."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "packages" / "kv-transport" / "examples" / "handover.py"


def test_the_example_runs() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:4] == [f"layer {layer} is verified at the decode node" for layer in range(4)]
    assert lines[4].endswith("in 4 units over shm, 0 retries")
