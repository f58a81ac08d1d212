"""How traffic and convergence grow with the number of nodes: 100,000 claimed blocks, steady updates, some loss.

Every node publishes five updates a second of virtual time: it claims a run of eight blocks, or gives eight up. One
message in a hundred is lost. Bytes are what all nodes together put on the bus, digests and answers included, for each
update published. Convergence is from the last update until every replica has applied all of them.
"""

import random
from dataclasses import dataclass

from bench.consistency_cases.network import MS, Network, block_hash
from bench.harness import Case, compare
from kv_consistency.events import LocalRemove, LocalStore, Removal
from kv_consistency.update import NamespaceRef, Run, Tier

NODES = (8, 16, 32, 64)
NUM_BLOCKS = 100_000
RUN = 64
STEADY = 8
RATE_HZ = 5
SECONDS = 4
LOSS = 0.01
NAMESPACE = NamespaceRef(b"bench--namespace", 16)
SLACK = 1.1
"""Each subscriber may cost a tenth more at 64 nodes than at 8."""


@dataclass(frozen=True, slots=True)
class Grown:
    """One row of the table."""

    num_nodes: int
    bytes_per_update: float
    messages_per_update: float
    convergence_ms: float

    @property
    def bytes_per_subscriber(self) -> float:
        return self.bytes_per_update / (self.num_nodes - 1)

    @property
    def messages_per_subscriber(self) -> float:
        return self.messages_per_update / (self.num_nodes - 1)


def scale_cases() -> list[Case]:
    rows = [measure(num_nodes) for num_nodes in NODES]
    out: list[Case] = []
    for row in rows:
        out.append(
            compare(
                f"bytes_per_update_{row.num_nodes}_nodes",
                row.bytes_per_update,
                "B",
                better="lower",
                note=f"{row.bytes_per_subscriber:.0f} B and {row.messages_per_subscriber:.2f} messages a subscriber",
            )
        )
        out.append(
            compare(
                f"convergence_{row.num_nodes}_nodes", row.convergence_ms, "virtual ms", better="lower", note="1 % lost"
            )
        )
    growth = rows[-1].bytes_per_subscriber / rows[0].bytes_per_subscriber
    out.append(
        compare(
            "bytes_per_subscriber_growth",
            growth,
            "times",
            better="lower",
            ours_need=SLACK,
            note=f"{rows[-1].num_nodes} nodes against {rows[0].num_nodes}: linear in subscribers is 1",
        )
    )
    return out


def measure(num_nodes: int) -> Grown:
    """One cluster: filled, then under steady updates, then left alone until it agrees."""
    network = Network(num_nodes)
    network.run(1_500 * MS)
    _fill(network)
    network.run(network.now_ns + 1_500 * MS)
    held = sum(replica.stats().claims for replica in network.replicas.values())
    if not network.agree() or held != NUM_BLOCKS // RUN * RUN * num_nodes:
        raise RuntimeError(f"{num_nodes} nodes did not agree on the blocks to begin with")
    network.lose(LOSS)
    nbytes, messages = network.sent_nbytes, network.sent_messages
    num_updates = _update_steadily(network)
    ended_ns = network.now_ns
    per_update = (network.sent_nbytes - nbytes) / num_updates, (network.sent_messages - messages) / num_updates
    while not network.agree():
        network.run(network.now_ns + MS)
    return Grown(num_nodes, *per_update, (network.now_ns - ended_ns) / MS)


def _fill(network: Network) -> None:
    for number in range(NUM_BLOCKS // RUN):
        name = network.names[number % len(network.names)]
        hashes = b"".join(block_hash(number * RUN + i) for i in range(RUN))
        run = Run(NAMESPACE, Tier.HOST, 0, hashes, b"abcd" * RUN)
        network.step(name, LocalStore(network.at(), (run,)))
        if number % 64 == 63:
            network.run(network.now_ns + 10 * MS)


def _update_steadily(network: Network) -> int:
    """Returns how many updates were published."""
    draw = random.Random("bench/scale")
    period_ns = 1_000 * MS // RATE_HZ
    times = [
        (second_ns + draw.randrange(period_ns), name)
        for second_ns in range(0, SECONDS * 1_000 * MS, period_ns)
        for name in network.names
    ]
    began_ns, fresh = network.now_ns, NUM_BLOCKS
    mine: dict[str, list[bytes]] = {name: [] for name in network.names}
    for at_ns, name in sorted(times):
        network.run(began_ns + at_ns)
        if mine[name] and draw.random() < 0.5:
            removal = Removal(NAMESPACE.digest, Tier.HOST, mine[name].pop())
            network.step(name, LocalRemove(network.at(), (removal,)))
        else:
            hashes = b"".join(block_hash(fresh + i) for i in range(STEADY))
            fresh += STEADY
            mine[name].append(hashes)
            run = Run(NAMESPACE, Tier.HOST, 0, hashes, b"abcd" * STEADY)
            network.step(name, LocalStore(network.at(), (run,)))
    return len(times)
