"""The example runs as it stands, alone."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "packages" / "kv-bus" / "examples" / "two_nodes.py"


def test_the_example_shows_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert lines[0] == "answer: 40"
    assert any(line.startswith("missed 1 to ") and line.endswith(" of counter") for line in lines)
    assert any(line.startswith("heard Count(value=") for line in lines)
    assert lines[-2:] == ["refused: cannot add -1", "stopped cleanly: True"]
