"""The faults of one run, from a seed: which, when, to whom and for how long. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

OF_PROCESSES = ("kill", "pause", "freeze", "restart", "flip at rest", "full disk")
"""What happens to a process or its disk, over any network. `pause` is shorter than what makes a node dead, `freeze`
longer."""

OF_KV = ("slow link", "flip in transit", "flip at rest", "full disk")
"""What only a process that holds KV can meet."""

HOLD_S = {"kill": 1.0, "pause": 0.7, "freeze": 4.5, "restart": 0.2}
HOLD_S |= {"partition": 2.5, "unplugged": 3.0, "deaf": 3.0, "mute": 3.0, "power off": 3.0, "slow link": 2.5}
HOLD_OTHERS_S = 1.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at `at_s` seconds from the start, healed `hold_s` later."""

    at_s: float
    kind: str
    victim: str
    hold_s: float


def schedule(
    seed: int, seconds: float, kinds: Sequence[str], nodes: Sequence[str], gateways: Sequence[str], gap_s: float
) -> list[Fault]:
    """Rounds of those kinds in an order of their own, one fault after the other, until the time is over; at least one
    round, however short the time is."""
    random = Random(f"{seed}/schedule")
    faults: list[Fault] = []
    now_s = gap_s
    while not faults or now_s < seconds:
        order = list(kinds)
        random.shuffle(order)
        for kind in order:
            if len(faults) >= len(kinds) and now_s >= seconds:
                break
            hold_s = HOLD_S.get(kind, HOLD_OTHERS_S) * random.uniform(0.9, 1.3)
            victims = nodes if kind in OF_KV else [*nodes, *gateways]
            faults.append(Fault(now_s, kind, random.choice(victims), hold_s))
            now_s += hold_s + gap_s * random.uniform(0.8, 1.2)
    return faults
