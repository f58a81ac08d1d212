"""Other Pythons on this machine that can run the simulator: its digests must be equal on all of them.

`python -m tests.sim.other_pythons` (`make pythons`) makes an environment `.venv-3.N` for each that is found on the path
or among pyenv's, with the pinned dependencies. The packages themselves are used where they lie.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kv_bus
import kv_client
import kv_consistency
import kv_core
import kv_prefix
import kv_services
import kv_transport

ROOT = Path(__file__).parents[2]
MINORS = range(11, 20)
_PACKAGES = (kv_core, kv_bus, kv_consistency, kv_prefix, kv_transport, kv_client, kv_services)
_MEMBERS = ("core", "bus", "consistency", "prefix", "transport", "client")


def environment() -> dict[str, str]:
    """Variables with which another interpreter finds these very packages."""
    sources = dict.fromkeys(str(Path(str(package.__file__)).parents[1]) for package in _PACKAGES)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}


def interpreters() -> dict[str, Path]:
    """One interpreter for each version but the running one, by `3.N`."""
    found: dict[str, Path] = {}
    for minor in MINORS:
        version = f"3.{minor}"
        if minor == sys.version_info.minor:
            continue
        for candidate in _candidates(version):
            if _answers(candidate, version):
                found[version] = candidate
                break
    return found


def ready() -> dict[str, Path]:
    """Those that have what the simulator imports: an environment made for it, or the interpreter itself."""
    usable: dict[str, Path] = {}
    for version, interpreter in interpreters().items():
        for candidate in (_home(version) / "bin" / "python", interpreter):
            call = [str(candidate), "-c", "import kv_services.sim.world"]
            if candidate.exists() and not subprocess.run(call, env=environment(), capture_output=True).returncode:
                usable[version] = candidate
                break
    return usable


def make() -> list[str]:
    """Make what `ready` looks for; the versions that there are environments of now."""
    made = []
    for version, interpreter in interpreters().items():
        home = _home(version)
        subprocess.run([interpreter, "-m", "venv", "--clear", home], check=True)
        members = [*(f"./packages/kv-{name}" for name in _MEMBERS), "./services"]
        pip = [str(home / "bin" / "pip"), "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "install", "-c", "constraints.txt", *members], check=True, cwd=ROOT)
        made.append(version)
    return made


def _home(version: str) -> Path:
    return ROOT / f".venv-{version}"


def _candidates(version: str) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python3"), reverse=True)


def _answers(interpreter: Path, version: str) -> bool:
    """Whether it starts and is that version; a name on the path may be a shim that says it is not installed."""
    call = [str(interpreter), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(call, capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version


if __name__ == "__main__":
    print(f"environments made for: {', '.join(make()) or 'no other Python here'}")
