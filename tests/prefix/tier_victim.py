"""Stores blocks in a folder until it is killed, and says on standard output what was acknowledged.

python -m tests.prefix.tier_victim FOLDER SEED NUM_BLOCKS
"""

import sys
from pathlib import Path
from random import Random

from kv_prefix.tiers.catalog import TierCatalog, TierRemoved
from tests.prefix.helpers_tiers import chain, open_store, prompt, with_bytes


def main(folder: str, seed: str, num_blocks: str) -> None:
    say = sys.stdout.write
    store, held = open_store(Path(folder), int(num_blocks))
    catalog = TierCatalog(store.num_places)
    store.forget(catalog.restore(held))
    catalog.take_events()
    random = Random(seed)
    say("open\n")
    sys.stdout.flush()
    while True:
        blocks = chain(prompt(random.randrange(100_000), random.randint(1, 6)))
        plan = catalog.plan_store(blocks)
        for event in catalog.take_events():
            if isinstance(event, TierRemoved):
                say(f"- {event.block.sequence.hex()}\n")
        # What may be gone is said before it can be.
        sys.stdout.flush()
        store.write(with_bytes(plan.writes), plan.forget)
        catalog.stored(plan, ok=True)
        catalog.take_events()
        for item in plan.writes:
            say(f"+ {item.block.sequence.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
