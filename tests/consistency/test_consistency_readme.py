"""What the README shows runs as it stands, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "kv-consistency" / "README.md"


def test_the_dozen_lines_of_the_readme_do_what_they_say() -> None:
    text = README.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(README), "exec"), {})
    assert f"print(error)  # {said.getvalue().strip()}\n" in code
    statements = [line for line in code.splitlines() if line and not line.startswith("from ")]
    assert len(statements) <= 13, "a dozen lines"
