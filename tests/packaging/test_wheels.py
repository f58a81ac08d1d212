"""Each package builds its own wheel and works installed alone, with nothing but what it declares.

Third-party wheels are downloaded once, in the pinned versions, into pytest's cache folder; after that nothing here
needs a network.
"""

import ast
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections import defaultdict
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
MEMBERS = [*sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml")), ROOT / "services"]
NAMES = ["kv-services" if member.name == "services" else member.name for member in MEMBERS]
NAMED = list(zip(NAMES, MEMBERS, strict=True))
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
NEEDS_A_CLUSTER = {"read_a_prefix.py", "store_a_cache.py"}
"""Run by tests/client, against real nodes."""
EXAMPLES = [
    (member.name, path)
    for member in MEMBERS
    for path in sorted(member.glob("examples/*.py"))
    if path.name not in NEEDS_A_CLUSTER
]

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# Imports every module of a package, and lists those that lack a third-party package, whether the interpreter says so
# or the module itself does by the error that names the extra.
IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
lacking = {}
def visit(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking[name] = error.name
        return
    except Exception as error:
        if type(error).__name__ != "MissingExtraError":
            raise
        lacking[name] = error.fields["module"]
        return
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not (child.name == "__main__" or (name + "." + child.name) in sys.argv[2:]):
            visit(name + "." + child.name)
visit(sys.argv[1])
print(json.dumps({"file": package.__file__, "lacking": lacking}))
"""


def run(command: list[str], **kwargs: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project(member: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    return table


def requirements(member: Path) -> list[Requirement]:
    return [Requirement(text) for text in project(member)["dependencies"]]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, by the package's name; built from copies, so that the working tree stays clean."""
    base = tmp_path_factory.mktemp("wheels")
    built = shutil.ignore_patterns("build", "dist", "*.egg-info", "*.so", "__pycache__")
    copies = []
    for member in MEMBERS:
        copy = base / "src" / member.name
        shutil.copytree(member, copy, ignore=built)
        copies.append(str(copy))
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(base / "out"), *copies])
    found = {path.name.split("-")[0].replace("_", "-"): path for path in (base / "out").glob("*.whl")}
    assert sorted(found) == sorted(NAMES)
    return found


@pytest.fixture(scope="module")
def wheelhouse(pytestconfig: pytest.Config) -> Path:
    """Every third-party wheel that some package declares, pinned."""
    wanted = sorted({str(one) for member in MEMBERS for one in requirements(member) if not one.name.startswith("kv-")})
    constraints = ROOT / "constraints.txt"
    key = hashlib.sha256(constraints.read_bytes() + json.dumps([wanted, sys.version]).encode()).hexdigest()[:16]
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("wheelhouse") / key
    if not (folder / "complete").exists():
        run([*PIP, "download", "--only-binary", ":all:", "-c", str(constraints), "-d", str(folder), *wanted])
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="module")
def alone(wheels: dict[str, Path], wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The interpreter of a clean environment for each package, with that package and what it declares."""
    interpreters = {}
    local = next(iter(wheels.values())).parent
    for name in NAMES:
        home = tmp_path_factory.mktemp(name)
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        sources = ["--no-index", "--find-links", str(local), "--find-links", str(wheelhouse)]
        run([*PIP, "--python", str(python), "install", *sources, "--no-compile", name])
        interpreters[name] = python
    return interpreters


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


@pytest.mark.parametrize("member", MEMBERS, ids=NAMES)
def test_ranges_say_what_is_needed(member: Path) -> None:
    for one in requirements(member):
        operators = {spec.operator for spec in one.specifier}
        assert ">=" in operators, f"{one} has no lower bound"
        if one.name.startswith("kv-"):
            assert "<" in operators, f"{one} would accept a sibling that breaks it"


@pytest.mark.parametrize("member", MEMBERS, ids=NAMES)
def test_ranges_admit_the_siblings_and_pins_of_this_tree(member: Path) -> None:
    versions = {project(other)["name"]: project(other)["version"] for other in MEMBERS}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        versions[name.lower().replace("_", "-")] = version
    for one in requirements(member):
        name = one.name.lower().replace("_", "-")
        assert name in versions, f"{one} has no pin in constraints.txt"
        assert one.specifier.contains(versions[name]), f"{one} refuses {versions[name]}"


@pytest.mark.parametrize(("name", "member"), NAMED, ids=NAMES)
def test_a_wheel_holds_its_package_typed_and_nothing_else(name: str, member: Path, wheels: dict[str, Path]) -> None:
    module = name.replace("-", "_")
    files = contents(wheels[name])
    assert f"{module}/py.typed" in files
    tops = {file.split("/")[0] for file in files}
    assert tops == {module, f"{module}-{project(member)['version']}.dist-info"}
    sources = {str(path.relative_to(member / "src")) for path in (member / "src").rglob("*.py")}
    assert sources <= set(files), "sources are missing from the wheel"
    with zipfile.ZipFile(wheels[name]) as archive:
        metadata = HeaderParser().parsestr(
            archive.read(f"{module}-{project(member)['version']}.dist-info/METADATA").decode()
        )
    assert metadata["Version"] == project(member)["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.parametrize("member", MEMBERS, ids=NAMES)
def test_a_package_has_readme_and_changelog_of_its_version(member: Path) -> None:
    assert (member / "README.md").stat().st_size > 0
    changes = (member / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changes or f"## {project(member)['version']}" in changes


def test_no_file_belongs_to_two_wheels(wheels: dict[str, Path]) -> None:
    owners = defaultdict(list)
    for name, wheel in wheels.items():
        for file in contents(wheel):
            owners[file].append(name)
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize(("name", "member"), NAMED, ids=NAMES)
def test_every_module_imports_with_what_the_wheel_declares(name: str, member: Path, alone: dict[str, Path]) -> None:
    extras = {
        Requirement(text).name.lower().replace("-", "_")
        for group in project(member).get("optional-dependencies", {}).values()
        for text in group
    }
    told = json.loads(run([str(alone[name]), "-I", "-c", IMPORT_ALL, name.replace("-", "_")], cwd="/"))
    assert str(alone[name].parent.parent) in told["file"], "imported from somewhere else"
    undeclared = {module: lack for module, lack in told["lacking"].items() if lack.split(".")[0] not in extras}
    assert undeclared == {}


@pytest.mark.parametrize(("owner", "example"), EXAMPLES, ids=[f"{owner}/{path.name}" for owner, path in EXAMPLES])
def test_an_example_runs_with_its_package_alone(owner: str, example: Path, alone: dict[str, Path]) -> None:
    name = "kv-services" if owner == "services" else owner
    output = run([str(alone[name]), "-I", str(example)], cwd="/", timeout=120)
    assert output.strip(), "an example shows something"
    assert ast.get_docstring(ast.parse(example.read_text())), "an example says what it shows"


def test_every_library_package_has_an_example() -> None:
    libraries = [member for member in MEMBERS if member.name != "services"]
    assert [member.name for member in libraries if not list(member.glob("examples/*.py"))] == []


def test_the_commands_of_the_services_start(alone: dict[str, Path]) -> None:
    scripts = project(ROOT / "services")["scripts"]
    for script in scripts:
        told = run([str(alone["kv-services"].parent / script), "--help"], cwd="/", timeout=60)
        assert "--" in told
