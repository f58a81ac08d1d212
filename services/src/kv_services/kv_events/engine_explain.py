"""What became of a prompt's blocks at an engine whose events are followed. Pure, and explaining changes nothing.

It knows the engine by its events alone: what it says stands as of the last event that took effect, and where events are
missing it says so instead of guessing.

E1: a block has one verdict, the first that applies in the order of `EngineVerdict`.
E2: "never announced" is said only while every event since the engine's beginning, or since it last cleared everything,
    has been heard; with the reservation, where there is one, that older ends of blocks are forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.explain import differing_fields
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.kv_events.engine_record import Fate, Gone
from kv_services.kv_events.follow_state import EngineFollower


class EngineVerdict(Enum):
    """What became of one block of a prompt at a followed engine."""

    HELD = "held by the engine"
    AFTER_GAP = "held, but behind a gap"
    REMOVED = "removed by the engine"
    CLEARED = "cleared by the engine"
    DROPPED = "dropped with all that was known of the engine"
    OTHER_NAMESPACE = "held in another namespace"
    MISSED = "missed in events not replayed yet"
    LOST = "missed in events that no replay gave"
    UNHEARD = "nothing heard of the engine yet"
    NEVER_ANNOUNCED = "never announced by the engine"


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """One full block of the prompt: its verdict, and a sentence with the particulars. `held` in whatever place."""

    block_idx: int
    verdict: EngineVerdict
    detail: str
    held: bool


_OF_FATE = {
    Fate.REMOVED: EngineVerdict.REMOVED,
    Fate.CLEARED: EngineVerdict.CLEARED,
    Fate.DROPPED: EngineVerdict.DROPPED,
}


def explain_followed(
    holder: Holder, follower: EngineFollower, index: PrefixIndex, namespace: Namespace, tokens: bytes
) -> Iterator[EngineBlock]:
    """Each full block of a prompt with its verdict, in order and one at a time, so that a caller may pause between.

    Args:
        holder: the engine as the index has it now.
        tokens: uint32 little-endian.
    """
    names = hash_tokens(namespace, tokens)
    others = [(o, hash_tokens(o, tokens)) for o in follower.namespaces if o != namespace]
    others = [(other, hashed) for other, hashed in others if other.block_size == namespace.block_size]
    run = next((match.num_blocks for match in index.lookup(names) if match.holder == holder), 0)
    for block_idx, name in enumerate(names):
        tiers = index.tiers_of(name).get(holder, ())
        if tiers:
            where = f"{holder.node} has it in {' and '.join(tier.name.lower() for tier in tiers)}"
            verdict = EngineVerdict.HELD if block_idx < run else EngineVerdict.AFTER_GAP
            behind = "" if block_idx < run else ", but not every block before it"
            yield EngineBlock(block_idx, verdict, where + behind + _missing_now(follower), True)
            continue
        gone = follower.record.get(name.sequence)
        if gone is not None:
            detail = _said_of(gone, follower) + _missing_now(follower)
            yield EngineBlock(block_idx, _OF_FATE[gone.fate], detail, False)
            continue
        field = next((o for o, hashed in others if holder in index.tiers_of(hashed[block_idx])), None)
        if field is not None:
            detail = f"{holder.node} holds it where {' and '.join(differing_fields(namespace, field))} differ"
            yield EngineBlock(block_idx, EngineVerdict.OTHER_NAMESPACE, detail, False)
            continue
        verdict, detail = _never_heard_of(follower)
        yield EngineBlock(block_idx, verdict, detail, False)


def _said_of(gone: Gone, follower: EngineFollower) -> str:
    """How a block ended, and what may have happened since that was not heard."""
    former = "" if gone.event.life == follower.life else "before it began anew: "
    detail = f"{former}{gone.cause} ({gone.event})" if gone.cause else f"{former}{gone.event}"
    lost = follower.lost
    if lost is not None and gone.fate is not Fate.DROPPED and (former or lost.last > gone.event.sequence):
        detail += f"; no replay gave {lost} after that"
    return detail


def _missing_now(follower: EngineFollower) -> str:
    gap = follower.gap
    return f"; {gap} not here yet" if gap is not None else ""


def _never_heard_of(follower: EngineFollower) -> tuple[EngineVerdict, str]:
    """The verdict on a block of which there is no trace."""
    if follower.gap is not None:
        return EngineVerdict.MISSED, f"no trace of it; {follower.gap} not here yet, and it may be told of there"
    if follower.lost is not None:
        return EngineVerdict.LOST, f"no trace of it; no replay gave {follower.lost}, and it may be told of there"
    if follower.orphaned is not None:
        return EngineVerdict.LOST, f"no trace of it; it may be among blocks without a known parent: {follower.orphaned}"
    if not follower.num_heard:
        return EngineVerdict.UNHEARD, "no event of it has come since this gateway began to listen"
    heard = f"in {follower.num_heard} batches"
    if follower.cleared is not None:
        heard = f"since it cleared everything: {follower.cleared}"
    skipped = follower.stats.skipped
    detail = f"no trace of it {heard}"
    if follower.record.forgot:
        detail += ", or one too old to be remembered"
    if skipped:
        detail += f"; {skipped} stores of other block sizes, adapters or contents were left out"
    return EngineVerdict.NEVER_ANNOUNCED, detail
