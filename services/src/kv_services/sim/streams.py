"""Named streams of chance: one per concern, so that a draw more in one does not shift the others."""

import random


def stream(seed: int, concern: str) -> random.Random:
    """The stream of `concern` under `seed`; the same in every process, whatever PYTHONHASHSEED says."""
    return random.Random(f"{seed}/{concern}")
