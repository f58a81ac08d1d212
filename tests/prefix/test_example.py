"""The package's example runs as shipped and says what the README says it does."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "packages" / "kv-prefix"


def test_the_example_prints_what_the_readme_shows() -> None:
    script = PACKAGE / "examples" / "share_a_prefix.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr == ""
    assert run.stdout.strip() in (PACKAGE / "README.md").read_text()
