"""Nodes whose object store is a real S3 server, with keys from a profile; and one whose profile is not there."""

import functools
from pathlib import Path

import pytest

from kv_services.config import RemoteTierSection, TiersSection
from kv_services.launch.errors import ProcessExitedError
from tests.integration.helpers_integration import BLOCK, prompt, running, until
from tests.prefix.conftest import KEY, SECRET
from tests.prefix.conftest import s3_server as s3_server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

LENGTH = 20 * BLOCK + 1


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credentials file with the profile `pool`, which the environment names."""
    file = tmp_path / "credentials"
    file.write_text(f"[pool]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_PROFILE", "pool")
    return file


def tiers(endpoint: str, prefix: str) -> TiersSection:
    return TiersSection(remote=RemoteTierSection(size="64 MiB", url=f"s3://bucket/{prefix}", endpoint=endpoint))


async def test_nodes_spill_to_s3_and_load_from_it_with_a_profiles_keys(
    s3_server: tuple[str, Path], profile: Path, tmp_path: Path
) -> None:
    server, bucket = s3_server
    async with running(slots=80, tiers=tiers(server, tmp_path.name)) as fabric:
        first = prompt(1, LENGTH)

        async def spilled(count: int) -> bool:
            found = (await fabric.status("prefill-1")).tiers.get("remote")
            return found is not None and found.waiting == found.writing == 0 and found.blocks >= count

        for seed in range(1, 6):
            asked = prompt(seed, LENGTH)
            assert (await fabric.ask(asked, 2)).is_right(asked, 2)
            # What is pushed out of memory before it is written would be missing below.
            await until(functools.partial(spilled, seed * 20 - 1))
        assert len(list((bucket / tmp_path.name / "prefill-1").glob("*.meta"))) >= 5 * 20 - 1
        answer = await fabric.ask(first, 2)
        assert answer.is_right(first, 2)
        await fabric.settle()


async def test_a_profile_that_is_not_there_ends_the_node_at_its_start_with_one_sentence(
    profile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "pol")
    with pytest.raises(ProcessExitedError) as caught:
        async with running(tiers=tiers("http://127.0.0.1:1", "x")):
            pass
    said = str(caught.value)
    assert f"AWS profile 'pol': it is neither in {profile} nor in {tmp_path / 'no-config'}" in said
    assert "Traceback" not in said and SECRET not in said
