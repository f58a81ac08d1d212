"""`transport.tls_folder` in a real cluster: right tokens, over TLS."""

from pathlib import Path

import pytest

from tests.integration.helpers_integration import prompt, running
from tests.transport.helpers_tls import OPENSSL, authority, certificate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates, and is not on this machine"),
]


async def test_a_cluster_with_certificates_gives_right_tokens(tmp_path: Path) -> None:
    folder = authority(tmp_path / "certs")
    for node in ("prefill-1", "decode-1"):
        certificate(folder, node)
    async with running(prefill=1, decode=1, backend="tcp", tls_folder=str(folder)) as fabric:
        one = prompt(1, 200)
        answer = await fabric.ask(one, 8)
        assert answer.is_right(one, 8) and answer.moved > 0
        assert answer.fabric["transport"] == "tcp"
        await fabric.settle()
