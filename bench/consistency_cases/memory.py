"""Memory of a million entries, and how long a full garbage collection takes beside them (CPU time).

Measured in a process of its own, by resident memory before and after. The log is held to 64 KiB, since it has its own
bound. An entry is a request with name, checksum, holders and owner; a claim is one block of one holder.
"""

import gc
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time

from bench.harness import Case, compare
from kv_consistency.events import Instant, Received, Tick
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import UpdateBatch
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import BlocksStored, EntryWritten, NamespaceRef, Operation, OwnerEpoch, Tier, Update
from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId, RequestId

NUM = 1_000_000
BATCH = 64
ENTRY_BYTES_MAX = 400
GC_MS_MAX = 50
NAMESPACE = NamespaceRef(b"bench--namespace", 16)
ORIGIN = Origin(NodeId("prefill-1"), Incarnation(1))
HOLDERS = (ORIGIN, Origin(NodeId("decode-1"), Incarnation(1)))
OWNER = OwnerEpoch(1, Origin(NodeId("gateway-1"), Incarnation(1)))


def memory_cases() -> list[Case]:
    """Bytes of an entry and of a claim at a million each, and a full collection with both."""
    command = [sys.executable, "-m", "bench.consistency_cases.memory"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return [
        compare("entry_bytes", found["entry"], "B", better="lower", ours_need=ENTRY_BYTES_MAX, note="at 1,000,000"),
        compare("claim_bytes", found["claim"], "B", better="lower", ours_need=ENTRY_BYTES_MAX, note="at 1,000,000"),
        compare(
            "gc_full",
            found["gc_ms"],
            "ms",
            better="lower",
            ours_need=GC_MS_MAX,
            note="1,000,000 entries and 1,000,000 claims, the median of 5",
        ),
    ]


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _feed(replica: KvCacheConsistencyManager, n: int, ops: list[tuple[Operation, ...]]) -> int:
    updates = tuple(Update(n + i, n + i, 0, op) for i, op in enumerate(ops, start=1))
    replica.step(Received(Instant(n, n), ORIGIN.node, UpdateBatch(ORIGIN, n + len(ops), updates)))
    return n + len(ops)


def _measure() -> dict[str, float]:
    replica = KvCacheConsistencyManager(NodeId("here"), config=ReplicaConfig(log_bytes_max=64 * 1024))
    replica.step(Tick(Instant(0, 0)))
    n, before = 0, _resident()
    for first in range(0, NUM, BATCH):
        ops: list[tuple[Operation, ...]] = []
        for i in range(first, first + BATCH):
            checksum = i * 0x9E3779B97F4A7C15 & (1 << 64) - 1
            name = RequestId(f"chatcmpl-{checksum:016x}{i:08x}")
            ops.append((EntryWritten(name, OWNER, 0, 1000 + i % 5000, checksum, HOLDERS, NAMESPACE),))
        n = _feed(replica, n, ops)
    with_entries = _resident()
    for first in range(0, NUM, BATCH):
        hashes = b"".join(
            (i * 0x9E3779B97F4A7C15 & (1 << 128) - 1).to_bytes(16, "big") for i in range(first, first + 64)
        )
        n = _feed(replica, n, [(BlocksStored(NAMESPACE, 0, Tier.HOST, 0, hashes, b"abcd" * BATCH),)])
    with_claims = _resident()
    stats = replica.stats()
    if (stats.entries, stats.claims) != (NUM, NUM):
        raise RuntimeError(f"not everything is there: {stats}")
    pauses: list[float] = []
    for _ in range(5):
        started = process_time()
        gc.collect()
        pauses.append(process_time() - started)
    return {
        "entry": (with_entries - before) / NUM,
        "claim": (with_claims - with_entries) / NUM,
        "gc_ms": statistics.median(pauses) * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(_measure()))
