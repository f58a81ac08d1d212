"""Certificates made for a test, by the openssl of this machine."""

import shutil
import subprocess
from pathlib import Path

from kv_transport.config import TlsConfig

OPENSSL = shutil.which("openssl")
EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def openssl(folder: Path, *arguments: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path) -> Path:
    folder.mkdir()
    openssl(folder, "req", "-x509", *EC, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    return folder


def certificate(folder: Path, name: str) -> TlsConfig:
    """Signed by the authority of that folder."""
    openssl(folder, "req", *EC, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return TlsConfig(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")
