"""The same events give the same effects in every process, whatever its hash seed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_consistency
from kv_core.ids import RequestId
from tests.consistency.helpers_consistency import MS, NAMESPACE, Cluster, node

ROOT = Path(__file__).parents[2]

SCRIPT = """
from tests.consistency.test_determinism import story
print(story())
"""


def story() -> str:
    """A digest over every effect of a cluster through stores, purges, loss, death and rebirth."""
    cluster = Cluster("a", "b", "c", "d")
    for i in range(12):
        cluster.store("abcd"[i % 4], range(i, i + 5), start=i)
        cluster.manager("b").register_update(RequestId(f"r{i}"), i, [node("a"), node("c")])
        cluster.drain("b")
        if i % 3 == 0:
            cluster.lose(lambda flight: flight.receiver == "c")
            cluster.manager("c").raise_scopes([NAMESPACE.scopes[i % 2]])
            cluster.drain("c")
        cluster.advance(30 * MS)
        cluster.deliver_all()
    cluster.kill("d")
    cluster.start("d", 2)
    cluster.kill("a")
    cluster.settle(rounds=20)
    digest = hashlib.sha256()
    for name in sorted(cluster.members):
        for effect in cluster.members[name].given:
            digest.update(repr(effect).encode())
    return digest.hexdigest()


def test_effects_do_not_depend_on_the_hash_seed() -> None:
    digests = {story()}
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_the_public_names_exist() -> None:
    assert sorted(kv_consistency.__all__) == sorted(set(kv_consistency.__all__))
    for name in kv_consistency.__all__:
        assert getattr(kv_consistency, name) is not None


@pytest.mark.parametrize("module", ["asyncio", "socket", "threading", "random", "kv_core.clock", "zmq", "selectors"])
def test_importing_the_package_brings_no_loop_no_socket_and_no_chance(module: str) -> None:
    code = (
        "import sys; import msgspec, msgpack, xxhash, kv_core.wire, kv_core.hashing; before = set(sys.modules);"
        f"import kv_consistency; sys.exit({module!r} in set(sys.modules) - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
