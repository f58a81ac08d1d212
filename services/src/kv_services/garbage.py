"""Garbage collection of a process whose loop must not stand still.

A full collection looks at every object there is, which for modules, classes and code alone takes some 50 ms: as long as
several requests. Those never become garbage, so once a process is up they are set aside. What the replica keeps of
entries and claims is not tracked by the collector at all (`bench/consistency.py`, `gc_full`), so what a full collection
is left with is what requests and connections have open.
"""

import gc


def set_aside() -> int:
    """Collect once, then set aside all that is left; how many objects that are.

    To be called when a life of the process has begun: what an earlier life had set aside is looked at again first.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
