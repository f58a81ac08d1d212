"""What the package promises about itself: what it imports, what it never uses, and that its example runs."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kv_core
from kv_core import limits

SOURCE = Path(kv_core.__file__).parent
PACKAGE = SOURCE.parents[1]
MODULES = sorted(SOURCE.rglob("*.py"))


def imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_brings_neither_a_clock_nor_the_testing_helpers() -> None:
    loaded = imported_by("import kv_core")
    assert {name for name in loaded if name.startswith("kv_core")} == {"kv_core"}


@pytest.mark.parametrize("module", ["hashing", "wire", "block", "header", "namespace", "geometry", "sharding_hybrid"])
def test_what_pure_packages_import_brings_no_clock_and_no_heavy_dependency(module: str) -> None:
    loaded = imported_by(f"import kv_core.{module}")
    assert not loaded & {"kv_core.clock", "kv_core.testing", "asyncio", "numpy", "gguf", "hypothesis", "socket"}


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_uses_builtin_hash_or_runs_foreign_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"hash", "eval", "exec", "compile", "__import__", "id"}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"pickle", "marshal", "shelve", "dill", "subprocess"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_decides_and_its_examples_hold(path: Path) -> None:
    name = ".".join(("kv_core", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    assert module.__doc__
    assert doctest.testmod(module).failed == 0


def test_limits_are_positive_and_fit_each_other() -> None:
    values = {name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}
    assert len(values) > 20
    assert all(value > 0 for name, value in values.items() if not name.startswith("MIN_INT"))
    tokens, block_names = 4 * limits.MAX_TOKENS_PER_REQUEST, 24 * limits.MAX_BLOCKS_PER_MESSAGE
    assert tokens + block_names < limits.MAX_MESSAGE_BYTES
    assert limits.MAX_BLOCKS_PER_MESSAGE * 16 == limits.MAX_TOKENS_PER_REQUEST
    assert limits.MAX_ARRAY_LENGTH >= 2 * limits.MAX_BLOCKS_PER_MESSAGE


def test_the_example_runs_and_shows_what_the_readme_says() -> None:
    example = PACKAGE / "examples" / "quick_start.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    readme = (PACKAGE / "README.md").read_text()
    shown = readme.split("It prints:\n\n```\n")[1].split("```")[0]
    assert done.stdout == shown
