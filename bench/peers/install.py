"""Install other transfer engines, indexes and routers, each in an environment of its own, to be measured beside ours.

    python bench/peers/install.py [nixl] [mooncake] [dynamo] [vllm-router]

Nothing of them is needed by the product, and nothing of the product is in their environments.
"""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
PACKAGES: Final[dict[str, Sequence[str]]] = {
    # Without its dependencies, which are a CUDA build of torch; its bindings need NumPy alone.
    "nixl": ("--no-deps", "nixl-cu12==1.5.1", "numpy==2.3.5"),
    "mooncake": ("--no-deps", "mooncake-transfer-engine-non-cuda==0.3.13"),
    "dynamo": ("ai-dynamo-runtime==1.6.1",),
    "vllm-router": ("vllm-router==0.1.17",),
}


def main() -> int:
    names = sys.argv[1:] or list(PACKAGES)
    for name in names:
        if name not in PACKAGES:
            print(f"unknown peer {name}; known: {', '.join(PACKAGES)}", file=sys.stderr)
            return 2
    failed = [name for name in names if not install(name)]
    return 1 if failed else 0


def install(name: str) -> bool:
    folder = HERE / ".envs" / name
    mark = folder / "installed"
    wanted = "\n".join(PACKAGES[name])
    if mark.exists() and mark.read_text() == wanted:
        return True
    mark.unlink(missing_ok=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *PACKAGES[name]], check=False)
    if done.returncode:
        print(f"{name} cannot be installed here", file=sys.stderr)
        return False
    mark.write_text(wanted)
    return True


if __name__ == "__main__":
    sys.exit(main())
