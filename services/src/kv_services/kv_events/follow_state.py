"""Follows the events of one engine: puts them in order, notices what is missing, and says what the index must learn.

Pure. Names of blocks are made here from their tokens, so the engine's hash scheme does not matter: its hashes are only
used to find a block's parent and to know what is removed.

F1: events take effect in the order of their numbers, each once, whatever the order of arrival. A stream whose numbers
    go back is a new life of the engine, of which everything is asked for. So is one in which an event comes again as
    sent at another time: a replay begins with the last event that is known, and one is asked for after each reconnect.
F2: a hole is asked for once; while its replay is under way later batches wait (bounded).
F3: what a replay could not give is given up: everything known is dropped, so that no block stays that may be gone. The
    same goes for an engine that is out of reach for long.
F4: a block whose parent is not known is not entered, and counted.
F5: what is remembered of an engine is bounded; beyond the bound everything known is dropped.
F6: of a block that is not held any more it can say how it ended (bounded), and of one that it never heard of, which
    events it may have been in: those that are missing just now, or that no replay gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.errors import KVError
from kv_core.hashing import BlockHash, extend
from kv_core.namespace import Namespace
from kv_prefix.events import Tier
from kv_services.kv_events.engine_record import EngineRecord, EventRef, Fate, Gone
from kv_services.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KVEvent, tier_of

MAX_WAITING: Final = 4096
"""Batches that wait for a replay; beyond that the hole is given up."""
RECENT: Final = 256
"""Events of which it is remembered when they were sent: one of them, sent again at another time, is of another life."""
MAX_KNOWN: Final = 1 << 22
"""Blocks of one engine; one that tells of more, without a removal, is begun anew. About a gigabyte."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The engine has these blocks in that tier; each is the child of the one before it."""

    tier: Tier
    names: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The engine has these blocks in that tier no more."""

    tier: Tier
    names: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of the engine stands any more."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the engine for its events from this number on, then say `replay_ended`."""

    start: int


Effect = Stored | Removed | Cleared | AskReplay


@dataclass(slots=True)
class FollowStats:
    """Counts since the start."""

    applied: int = 0
    duplicates: int = 0
    recoveries: int = 0
    resets: int = 0
    orphans: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that did not come: the numbers of the first and the last."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"event {self.first}" if self.first == self.last else f"events {self.first}-{self.last}"


class EngineFollower:
    """The state of one followed engine.

    Args:
        namespace: what its blocks are, for requests without an adapter.
        loras: revisions of the adapters that are followed, by name; events of others are skipped.
    """

    def __init__(self, namespace: Namespace, loras: dict[str, str] | None = None) -> None:
        self._namespace = namespace
        self._loras = loras or {}
        self._next = 0
        self._streamed = -1
        self._waiting: dict[int, tuple[float, Sequence[KVEvent]]] = {}
        self._replays = 0
        self._life = 1
        self._sent_s: dict[int, float] = {}
        self._lost: Gap | None = None
        self._cleared: EventRef | None = None
        self._orphaned: EventRef | None = None
        # By the engine's hash: our name, the number of tokens to its end, the namespace, the tiers it is in.
        self._known: dict[EngineHash, tuple[BlockHash, int, Namespace, set[Tier]]] = {}
        self.stats = FollowStats()
        self.record = EngineRecord()

    @property
    def namespaces(self) -> list[Namespace]:
        """What its blocks are, without an adapter first."""
        return [self._namespace, *(self._adapted(name, revision) for name, revision in self._loras.items())]

    @property
    def num_heard(self) -> int:
        """Batches that took effect, since the start."""
        return self.stats.applied

    @property
    def num_replays(self) -> int:
        """Replays that were asked for and have not ended."""
        return self._replays

    @property
    def life(self) -> int:
        """Which of the engine's numberings the events are of; they begin anew when it does."""
        return self._life

    @property
    def gap(self) -> Gap | None:
        """The events that are missing just now, up to the next that is here and waits for them."""
        return Gap(self._next, min(self._waiting) - 1) if self._waiting else None

    @property
    def lost(self) -> Gap | None:
        """The latest events that no replay gave, since the engine last began anew or cleared everything."""
        return self._lost

    @property
    def cleared(self) -> EventRef | None:
        """The latest event by which the engine cleared everything."""
        return self._cleared

    @property
    def orphaned(self) -> EventRef | None:
        """The latest event that told of blocks whose parent is not known, as `lost`."""
        return self._orphaned

    def batch(
        self, sequence: int, events: Sequence[KVEvent], *, replayed: bool = False, sent_s: float = 0.0
    ) -> list[Effect]:
        """A batch came, from the stream or from a replay.

        Args:
            sent_s: when it was sent, by the engine's clock.
        """
        if not replayed and sequence < self._streamed:
            return self._began_anew(sequence, events, sent_s, f"after event {self._streamed} came event {sequence}")
        if not replayed:
            self._streamed = sequence
        known_s = self._sent_s.get(sequence, sent_s)
        if known_s < sent_s or known_s > sent_s:  # what is no number is never of another time
            return self._began_anew(sequence, events, sent_s, f"event {sequence} came as sent at another time")
        if sequence < self._next or sequence in self._waiting:
            self.stats.duplicates += 1
            return []
        self._waiting[sequence] = sent_s, events
        effects = self._drain()
        if self._waiting and not self._replays:
            self._replays = 1
            self.stats.recoveries += 1
            # The last one that is known comes along: whether it is still the same event tells whether the engine is.
            effects.append(AskReplay(max(0, self._next - 1)))
        elif len(self._waiting) > MAX_WAITING:
            effects += self._give_up()
        return effects

    def replay_ended(self) -> list[Effect]:
        """The engine has given what it still had, to one question."""
        self._replays = max(0, self._replays - 1)
        return self._give_up() if self._waiting and not self._replays else []

    def replay_missed(self) -> list[Effect]:
        """No question is answered any more."""
        self._replays = 0
        return self._give_up() if self._waiting else []

    def reconnected(self) -> list[Effect]:
        """The engine is in reach again. Whether it is still the same one tells the last of its events."""
        if self._streamed < 0:
            return []
        self._replays += 1
        return [AskReplay(max(0, self._next - 1))]

    def unreachable(self) -> list[Effect]:
        """The engine is out of reach for long and may hold nothing by now. What it tells next is heard as at first."""
        if self._streamed < 0:
            return []
        at = EventRef(self._life, self._next - 1, self._sent_s.get(self._next - 1, 0.0))
        self._waiting.clear()
        self._life += 1
        self._replays, self._streamed, self._lost, self._orphaned = 0, -1, None, None
        self.stats.resets += 1
        return self._reset(0, at, f"it is out of reach since event {at.sequence}")

    def _began_anew(self, sequence: int, events: Sequence[KVEvent], sent_s: float, cause: str) -> list[Effect]:
        """A stream's numbers only grow and an event is sent once, so the engine has begun a new life; or its past comes
        again. Ask which."""
        self._waiting.clear()
        self._life += 1
        self._lost = self._orphaned = None
        at = EventRef(self._life, sequence, sent_s)
        effects = self._reset(0, at, f"{cause}: it begins anew")
        self._streamed, self._waiting[sequence] = sequence, (sent_s, events)
        self._replays += 1
        self.stats.recoveries += 1
        return [*effects, *self._drain(), AskReplay(0)]

    def _give_up(self) -> list[Effect]:
        following = min(self._waiting)
        self._lost = Gap(self._next, following - 1)
        at = EventRef(self._life, following, self._waiting[following][0])
        effects = self._reset(following, at, f"no replay gave {self._lost}")
        self.stats.resets += 1
        return [*effects, *self._drain()]

    def _reset(self, following: int, at: EventRef, cause: str) -> list[Effect]:
        self._forget_all(Gone(Fate.DROPPED, at, cause))
        self._next = following
        self._sent_s.clear()
        self._waiting = {number: batch for number, batch in self._waiting.items() if number >= following}
        return [Cleared()]

    def _forget_all(self, gone: Gone) -> None:
        self.record.all_gone(self._known, lambda known: known[0].sequence, gone)
        self._known = {}

    def _drain(self) -> list[Effect]:
        effects: list[Effect] = []
        while (batch := self._waiting.pop(self._next, None)) is not None:
            at = EventRef(self._life, self._next, batch[0])
            self._next += 1
            self._sent_s[at.sequence] = batch[0]
            if len(self._sent_s) > RECENT:
                del self._sent_s[next(iter(self._sent_s))]
            self.stats.applied += 1
            for event in batch[1]:
                effects += self._apply(event, at)
        return effects

    def _apply(self, event: KVEvent, at: EventRef) -> list[Effect]:
        match event:
            case BlockStored():
                return self._stored(event, at)
            case BlockRemoved(block_hashes=hashes, medium=medium):
                return self._removed(hashes, tier_of(medium), at)
            case AllBlocksCleared():
                self._forget_all(Gone(Fate.CLEARED, at))
                self._lost, self._orphaned, self._cleared = None, None, at
                return [Cleared()]

    def _stored(self, event: BlockStored, at: EventRef) -> list[Effect]:
        namespace = self._namespace_of(event)
        size, count = event.block_size, len(event.block_hashes)
        if namespace is None or size != namespace.block_size or len(event.token_ids) != size * count or not count:
            self.stats.skipped += 1
            return []
        parent, start = None, 0
        if event.parent_block_hash is not None:
            found = self._known.get(event.parent_block_hash)
            if found is None or found[2] != namespace:
                self.stats.orphans += count
                self._orphaned = at
                return []
            parent, start = found[0], found[1]
        try:
            names = extend(namespace, parent, start, event.token_ids)
        except KVError:
            self.stats.skipped += 1
            return []
        tier, effects = tier_of(event.medium), list[Effect]()
        for i, (engine_hash, name) in enumerate(zip(event.block_hashes, names, strict=True)):
            known = self._known.get(engine_hash)
            tiers = known[3] if known is not None and known[0] == name else set()
            if known is not None and known[0] != name:
                # Its removal will be told of under this hash, and nobody can say then of which of the two.
                effects += [Removed(former, (known[0],)) for former in sorted(known[3])]
                gone = Gone(Fate.DROPPED, at, "the engine told of another block under its hash")
                self.record.removed(known[0].sequence, gone)
            self._known[engine_hash] = name, start + (i + 1) * size, namespace, tiers | {tier}
        if len(self._known) > MAX_KNOWN:
            self._forget_all(Gone(Fate.DROPPED, at, f"it told of more than {MAX_KNOWN} blocks"))
            self.stats.resets += 1
            return [Cleared()]
        return [*effects, Stored(tier, tuple(names))]

    def _removed(self, hashes: Sequence[EngineHash], tier: Tier, at: EventRef) -> list[Effect]:
        names, gone = [], Gone(Fate.REMOVED, at)
        for engine_hash in hashes:
            known = self._known.get(engine_hash)
            if known is None or tier not in known[3]:
                continue
            names.append(known[0])
            known[3].discard(tier)
            if not known[3]:
                del self._known[engine_hash]
                self.record.removed(known[0].sequence, gone)
        return [Removed(tier, tuple(names))] if names else []

    def _namespace_of(self, event: BlockStored) -> Namespace | None:
        """None: an adapter or content that is not followed."""
        if event.extra_keys is not None and any(keys for keys in event.extra_keys):
            extra = {key for keys in event.extra_keys if isinstance(keys, list) for key in keys}
            if extra - {event.lora_name}:
                return None  # pictures or salts: their content is not in the event
        if event.lora_name is None:
            return None if event.lora_id else self._namespace
        revision = self._loras.get(event.lora_name)
        return None if revision is None else self._adapted(event.lora_name, revision)

    def _adapted(self, lora_name: str, lora_revision: str) -> Namespace:
        n = self._namespace
        return Namespace(
            n.model_id,
            n.weights_revision,
            lora_name=lora_name,
            lora_revision=lora_revision,
            salt=n.salt,
            dtype=n.dtype,
            fidelity=n.fidelity,
            block_size=n.block_size,
        )
