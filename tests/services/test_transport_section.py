"""What the cluster file says about TLS, and what a node makes of it."""

from pathlib import Path

import pytest

from kv_services.config import TransportSection
from kv_services.config_errors import ConfigError
from kv_services.config_file import dump_config, parse_config
from kv_services.launch import PortReservation, local_config
from kv_services.node.process import tls_files


def test_tls_files_are_named_after_the_node_and_lie_beside_the_cluster_file(tmp_path: Path) -> None:
    with PortReservation() as ports:
        text = dump_config(local_config(ports, transport=TransportSection(tls_folder="certs")))
    config = parse_config(text, file=tmp_path / "cluster.toml")
    files = tls_files(config.transport.tls_folder, "decode-1")
    assert files is not None
    folder = tmp_path / "certs"
    assert (files.certificate, files.key, files.ca) == (
        folder / "decode-1.pem",
        folder / "decode-1.key",
        folder / "ca.pem",
    )
    assert tls_files("", "decode-1") is None


def test_tls_and_ucx_exclude_each_other() -> None:
    with PortReservation() as ports:
        text = dump_config(local_config(ports, transport=TransportSection(tls_folder="certs", allow_ucx=True)))
    with pytest.raises(ConfigError, match="unencrypted"):
        parse_config(text)
