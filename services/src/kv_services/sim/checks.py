"""What must hold of every node at any time, and of all of them when everything has healed and settled.

K1: `free + cached + pinned == total`, and the pool's own invariants.
K2: every findable block holds the bytes that its tokens make, and its checksum, where sealed, is that of its bytes.
K3: a node's own claims in its own index are what its pool holds, and no more than it holds at all, but for what its
    pool did just now and others are about to be told. What it does while it ends is told to nobody: claims end with
    their life.
K4: settled: every replica has applied the same of every living origin, every index says exactly what the nodes hold,
    nobody owns anything that is not given back, nobody waits, and whoever left is nobody's member.
"""

from collections.abc import Iterable

from kv_consistency.version_vector import VersionVector
from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_prefix.prefix_index import Holder, HolderMatch
from kv_services.engine.errors import KVContentError
from kv_services.membership.state import Liveness
from kv_services.sim.holdings import blocks_in_memory, chain_to, chains_below, chains_in_memory, depth, names_held
from kv_services.sim.node import MODEL, SimNode


class CheckError(KVError):
    """An invariant does not hold."""

    code = 7092
    template = "{node} {what}"


class BlockChecker:
    """K1 and K2, at every change of a pool; each stored block is looked at once, and all of them now and then.

    Attributes:
        refused: what was wrong at a change of a pool, in the middle of the code under test.
    """

    def __init__(self) -> None:
        self.refused: list[CheckError] = []
        self._known: dict[Holder, dict[tuple[int, int, BlockHash], None]] = {}
        self.num_blocks = 0

    def changed(self, node: SimNode) -> None:
        """The node's pool stored or removed blocks."""
        try:
            self._count(node)
            known = self._known.get(node.holder, {})
            self._known[node.holder] = self._look(node, known)
        except CheckError as error:
            self.refused.append(error)

    def all(self, node: SimNode) -> None:
        """Look at everything a node has, whether it was seen before or not."""
        assert node.work is not None
        self._count(node)
        node.work.ctx.pool.check()
        self._known[node.holder] = self._look(node, {})

    def _count(self, node: SimNode) -> None:
        assert node.work is not None
        stats = node.work.ctx.pool.stats()
        if stats.free + stats.cached + stats.pinned != stats.total:
            raise CheckError(node=node.name, what=f"counts {stats}")

    def _look(
        self, node: SimNode, known: dict[tuple[int, int, BlockHash], None]
    ) -> dict[tuple[int, int, BlockHash], None]:
        assert node.work is not None
        arena, blocks = node.work.ctx.arena, blocks_in_memory(node.work)
        generations: list[int] = arena.generations.tolist()
        now = {(slot, generations[slot], name): None for name, (_, _, slot) in blocks.items()}
        new = [name for name in now if name not in known]
        self.num_blocks += len(new)
        followed = {blocks[block_hash][0] for _, _, block_hash in new}
        for slot, _, block_hash in new:
            if block_hash not in followed:
                # With it all before it are looked at.
                chain = chain_to(block_hash, blocks)
                try:
                    MODEL.verify(arena, chain.tokens, chain.slots)
                except KVContentError as error:
                    raise CheckError(node=node.name, what=f"offers wrong bytes: {error}") from None
            for layer in range(arena.geometry.num_layers):
                check = int(arena.checks[layer, slot])
                if check and check != crc64(arena.cell(slot, layer)):
                    raise CheckError(node=node.name, what=f"has a wrong checksum of slot {slot}, layer {layer}")
        return now


def check_own_claims(node: SimNode, purging: bool = False) -> None:
    """K3. `purging`: it has heard of a purge, and may carry it out at its next tick only."""
    assert node.work is not None
    telling = node.work.ctx.telling
    if telling.due or telling.over:
        return
    if node.work.ctx.pool.has_events:
        raise CheckError(node=node.name, what="has blocks of which nobody is about to be told")
    index, held = node.base.index, names_held(node.work)
    for chain in chains_in_memory(node.work):
        said = _said(index.lookup(chain.hashes)).get(node.holder, 0)
        # What lies below is announced a slice at a time.
        if not (0 if purging else len(chain.hashes)) <= said <= depth(held, chain.hashes):
            raise CheckError(node=node.name, what=f"says {said} of its own blocks, has {len(chain.hashes)}")
    for tier in node.work.ctx.tiers.tiers:
        tier.catalog.check()


def check_settled(nodes: Iterable[SimNode]) -> None:
    """K4."""
    everybody = list(nodes)
    nodes = [node for node in everybody if not node.away]
    gone = [node.name for node in everybody if node.away]
    for node in nodes:
        remembered = [name for name in gone if name in node.base.cluster.view.members]
        if remembered:
            raise CheckError(node=node.name, what=f"still counts {remembered}, who left")
        if not node.ready:
            raise CheckError(node=node.name, what="did not come back")
        things = node.open_things()
        if things:
            raise CheckError(node=node.name, what=f"still has {things}")
        lag = {str(origin): n for origin, n in node.replica.lag().items() if n}
        if lag:
            raise CheckError(node=node.name, what=f"still lacks {lag}")
        for other in nodes:
            if node is not other and not _knows(node, other):
                raise CheckError(node=node.name, what=f"does not hold {other.name}/{other.incarnation} for alive")
    first = _of_living(nodes[0].replica.manager.vector(), nodes)
    held = {node.holder: names_held(node.work) for node in nodes if node.work is not None}
    works = [node.work for node in nodes if node.work is not None]
    chains = {chain.hashes: None for work in works for chain in chains_in_memory(work)}
    chains |= {names: None for work in works for names in chains_below(work)}
    names = {name: None for known in held.values() for name in known}
    for node in nodes:
        vector = _of_living(node.replica.manager.vector(), nodes)
        if vector != first:
            raise CheckError(node=node.name, what=f"applied {vector}, {nodes[0].name} {first}")
        for hashes in chains:
            truth = {holder: have for holder, names in held.items() if (have := depth(names, hashes))}
            said = _said(node.base.index.lookup(hashes))
            if said != truth:
                raise CheckError(node=node.name, what=f"says {said} of a prefix, the nodes hold {truth}")
        for name in names:
            where = {holder: known[name] for holder, known in held.items() if name in known}
            if (said_where := node.base.index.tiers_of(name)) != where:
                raise CheckError(node=node.name, what=f"says {said_where} of a block, it is in {where}")


def _knows(node: SimNode, other: SimNode) -> bool:
    """Whether a node holds the present life of another for alive, in its membership and its replica."""
    member = node.base.cluster.view.members.get(other.name)
    alive = member is not None and member.liveness is Liveness.ALIVE and member.incarnation == other.incarnation
    return alive and not node.replica.manager.is_over(other.replica.manager.origin)


def _said(matches: list[HolderMatch]) -> dict[Holder, int]:
    return {match.holder: match.num_blocks for match in matches}


def _of_living(vector: VersionVector, nodes: list[SimNode]) -> dict[str, int]:
    living = {node.replica.manager.origin for node in nodes}
    return {str(origin): vector[origin] for origin in vector if origin in living}
