"""The catalog of a tier against a plain model: sets of blocks, and a medium that is a dict from place to block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import token_bytes
from kv_prefix.events import RemovalReason
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, prefix_digests
from kv_prefix.tiers.catalog import GROW_AFTER, StorePlan, TierCatalog, TierRemoved, TierStored
from tests.prefix.helpers_tiers import BLOCK_SIZE, NS, OTHER_NS, chain, names_of, prompt

PROMPTS = [prompt(seed, 5, shared) for seed in range(4) for shared in (0, 2)]
CHAINS = [chain(tokens) for tokens in PROMPTS]


class Medium:
    """What a tier's owner would do, on a dict; and what the catalog said happened."""

    def __init__(self, num_places: int) -> None:
        self.catalog = TierCatalog(num_places)
        self.bytes: dict[int, TierBlock] = {}
        self.records: dict[int, TierBlock] = {}
        self.storing: list[StorePlan] = []
        self.loading: list[tuple[PlacedBlock, ...]] = []
        self.present: set[bytes] = set()

    def forget(self, places: tuple[int, ...]) -> None:
        for place in places:
            self.records.pop(place, None)

    def begin_store(self, blocks: list[TierBlock]) -> None:
        plan = self.catalog.plan_store(blocks)
        self.forget(plan.forget)
        busy = {item.place for load in self.loading for item in load}
        busy |= {item.place for other in self.storing for item in other.writes}
        for item in plan.writes:
            assert item.place not in busy, "C3: bytes in use would be overwritten"
            self.bytes[item.place] = item.block
        self.storing.append(plan)

    def end_store(self, plan: StorePlan, ok: bool, full: bool) -> None:
        if ok:
            self.records |= {item.place: item.block for item in plan.writes}
        self.forget(self.catalog.stored(plan, ok=ok, medium_full=full and not ok))

    def end_load(self, load: tuple[PlacedBlock, ...], bad: int) -> None:
        for item in load:
            assert self.bytes[item.place] == item.block, "C3: another block's bytes were read"
        self.forget(self.catalog.end_load(load, load[:bad]))

    def settle(self) -> None:
        for event in self.catalog.take_events():
            if isinstance(event, TierStored):
                self.present |= {block.sequence for block in event.blocks}
            else:
                self.present.remove(event.block.sequence)
        self.catalog.check()
        assert self.present == {block.sequence for block in self.catalog.blocks()}
        # A restart finds exactly what can be found now, beside what is being written.
        assert self.present == {block.sequence for block in self.records.values()}


@settings(max_examples=60)
@given(
    num_places=st.integers(1, 9),
    run=st.lists(
        st.tuples(st.sampled_from(["store", "end_store", "load", "end_load", "purge"]), *[st.integers(0, 40)] * 3),
        max_size=40,
    ),
)
def test_no_bytes_in_use_are_overwritten_and_books_agree(num_places: int, run: list[tuple[str, int, int, int]]) -> None:
    medium = Medium(num_places)
    for kind, pick, first, count in run:
        blocks = CHAINS[pick % len(CHAINS)][first % 5 :][: 1 + count % 5]
        if kind == "store":
            medium.begin_store(blocks)
        elif kind == "end_store" and medium.storing:
            medium.end_store(medium.storing.pop(pick % len(medium.storing)), ok=first % 4 > 0, full=count % 2 > 0)
        elif kind == "load":
            known = [block for name in names_of(blocks) if (block := medium.catalog.get(name))]
            load = medium.catalog.begin_load(known)
            if load:
                medium.loading.append(load)
        elif kind == "end_load" and medium.loading:
            medium.end_load(medium.loading.pop(pick % len(medium.loading)), bad=first % 3)
        elif kind == "purge" and first % 4 == 0:
            gone = {block.sequence for block in blocks}
            medium.forget(medium.catalog.purge(lambda block, gone=gone: block.sequence in gone))  # type: ignore[misc]
        medium.settle()
    while medium.storing:
        medium.end_store(medium.storing.pop(), ok=True, full=False)
    while medium.loading:
        medium.end_load(medium.loading.pop(), bad=0)
    medium.settle()
    stats = medium.catalog.stats()
    assert stats.writing == stats.loading == 0 and stats.stored <= num_places


@settings(max_examples=60)
@given(st.data())
def test_a_match_is_a_plain_walk_over_what_is_stored(data: st.DataObject) -> None:
    catalog = TierCatalog(32)
    stored: set[bytes] = set()
    for one in CHAINS:
        kept = data.draw(st.lists(st.sampled_from(one), unique=True))
        catalog.stored(catalog.plan_store(kept), ok=True)
        stored |= {block.sequence for block in kept}
    tokens, blocks = data.draw(st.sampled_from(list(zip(PROMPTS, CHAINS, strict=True))))
    first = data.draw(st.integers(0, 5))
    expected = []
    for block in blocks[first:]:
        if block.sequence not in stored:
            break
        expected.append(block.sequence)
    raw = token_bytes(tokens)
    found = catalog.match(NS.digest, names_of(blocks), raw, {}, first)
    assert [block.sequence for block in found] == expected
    # Piece by piece, with the digests at hand, it is the same.
    digests = list(prefix_digests(NS.digest, raw, 4 * BLOCK_SIZE, {}))
    most = data.draw(st.integers(1, 6))
    assert catalog.match(NS.digest, names_of(blocks), raw, {}, first, digests, most) == found[:most]


def test_a_block_behind_other_tokens_is_no_match_though_its_names_and_own_tokens_agree() -> None:
    mine, other = chain(prompt(1, 3)), chain(prompt(2, 3))
    catalog = TierCatalog(8)
    # Both hashes of the parents collide: what follows them has equal names and equal tokens.
    tokens = prompt(1, 2) + prompt(2, 3)[8:]
    forged = [
        TierBlock(b.namespace, b.block_idx, n.sequence, n.check, b.parent, b.prefix_digest, b.tokens, (), b.checks)
        for b, n in zip(other, names_of(mine), strict=True)
    ]
    catalog.stored(catalog.plan_store(forged[2:]), ok=True)
    assert catalog.get(names_of(mine)[2]) is not None
    assert catalog.match(NS.digest, names_of(mine), token_bytes(tokens), {}, 2) == []


def test_another_namespace_matches_nothing() -> None:
    blocks = chain(prompt(1, 3))
    catalog = TierCatalog(8)
    catalog.stored(catalog.plan_store(blocks), ok=True)
    raw = token_bytes(prompt(1, 3))
    assert catalog.match(OTHER_NS.digest, names_of(chain(prompt(1, 3), OTHER_NS)), raw, {}, 0) == []
    # Not even under equal names.
    assert catalog.match(OTHER_NS.digest, names_of(blocks), raw, {}, 0) == []


def test_a_prefix_shrinks_from_its_end() -> None:
    catalog = TierCatalog(8)
    first = chain(prompt(1, 8))
    catalog.stored(catalog.plan_store(first), ok=True)
    catalog.stored(catalog.plan_store(chain(prompt(2, 4))), ok=True)
    catalog.take_events()
    raw = token_bytes(prompt(1, 8))
    assert len(catalog.match(NS.digest, names_of(first), raw, {}, 0)) == 4


def test_when_every_place_is_in_use_a_store_is_refused_at_once() -> None:
    catalog = TierCatalog(3)
    blocks = chain(prompt(1, 3))
    catalog.stored(catalog.plan_store(blocks), ok=True)
    load = catalog.begin_load(blocks)
    assert len(load) == 3
    assert catalog.plan_store(chain(prompt(2, 2))) == StorePlan((), ())
    assert catalog.stats().refused == 2
    catalog.end_load(load)
    assert len(catalog.plan_store(chain(prompt(2, 2))).writes) == 2


def test_a_full_medium_keeps_what_it_has_then_tries_to_grow() -> None:
    catalog = TierCatalog(GROW_AFTER * 2)
    catalog.stored(catalog.plan_store(chain(prompt(1, 4))), ok=True)
    failed = catalog.plan_store(chain(prompt(2, 4)))
    catalog.stored(failed, ok=False, medium_full=True)
    assert catalog.stats().limit == 4 and catalog.stats().stored == 4
    for seed in range(3, 3 + GROW_AFTER // 4):
        catalog.stored(catalog.plan_store(chain(prompt(seed, 4))), ok=True)
    assert catalog.stats().stored == 4 and catalog.stats().limit == GROW_AFTER * 2
    assert any(isinstance(e, TierRemoved) and e.reason is RemovalReason.EVICTED for e in catalog.take_events())


def test_a_restart_takes_up_what_fits_and_names_the_rest() -> None:
    one = chain(prompt(1, 4))
    catalog = TierCatalog(3)
    placed = [PlacedBlock(place, block) for place, block in zip((0, 2, 7), one, strict=False)]
    placed.append(PlacedBlock(1, one[0]))
    assert catalog.restore(placed) == (7, 1)
    catalog.check()
    assert [block.block_idx for block in catalog.blocks()] == [0, 1]
    assert len(catalog.plan_store(chain(prompt(2, 1))).writes) == 1
