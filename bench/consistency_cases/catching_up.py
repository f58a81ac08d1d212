"""A replica that missed 10,000 updates: what catching up sends, against those updates' own bytes."""

import msgspec

from bench.consistency_cases.network import MS, Network
from bench.harness import Case, compare
from kv_consistency.effects import BroadcastUpdates
from kv_consistency.events import LocalStore
from kv_consistency.update import NamespaceRef, Run, Tier

NUM_MISSED = 10_000
FACTOR_MAX = 1.3
NAMESPACE = NamespaceRef(b"bench--namespace", 16)


def catch_up_cases() -> list[Case]:
    """Both replicas tick as in production; whatever either sends counts, digests included."""
    network = Network(2)
    network.run(2_000 * MS)
    writer, behind = network.names
    own_nbytes = 0
    for n in range(NUM_MISSED):
        run = Run(NAMESPACE, Tier.HOST, n % 64, n.to_bytes(16, "little"), b"abcd")
        for effect in network.replicas[writer].step(LocalStore(network.at(), (run,))):
            if isinstance(effect, BroadcastUpdates):
                own_nbytes += sum(len(msgspec.msgpack.encode(update)) for update in effect.batch.updates)
    before, started_ns = network.sent_nbytes, network.now_ns
    while not network.agree():
        network.run(network.now_ns + MS)
    if network.replicas[behind].stats().claims != NUM_MISSED:
        raise RuntimeError("the replicas agree on something else")
    sent = network.sent_nbytes - before
    return [
        compare(
            "catch_up_bytes",
            sent / own_nbytes,
            "times own bytes",
            better="lower",
            ours_need=FACTOR_MAX,
            note=f"{NUM_MISSED:,} updates of {own_nbytes:,} B; {sent:,} B sent",
        ),
        compare("catch_up_time", (network.now_ns - started_ns) / MS, "virtual ms", better="lower"),
    ]
