"""The faults, first those of metadata. Each is one that somebody could make, or that another system had."""

from typing import Final

from tests.mutants.catalog_blocks import POOL, TRANSFER
from tests.mutants.catalog_prefix import PREFIX
from tests.mutants.catalog_shards import SHARDS
from tests.mutants.mutant import Mutant

_HLC: Final = "tests/consistency/test_hlc.py"
_HLC_INVARIANTS: Final = "tests/consistency/test_hlc_invariants.py"
_CLOCK_FAULTS: Final = "tests/consistency/test_clock_faults.py"
_VECTOR: Final = "tests/consistency/test_version_vector.py"
_LOG: Final = "tests/consistency/test_update_log.py"
_BUFFER: Final = "tests/consistency/test_causal_buffer.py"
_CLAIMS: Final = "tests/consistency/test_claims.py"
_FIELD: Final = "tests/consistency/test_field_faults.py"
_MANAGER: Final = "tests/consistency/test_manager.py"
_LIVES: Final = "tests/consistency/test_lives.py"
_ENTRIES: Final = "tests/consistency/test_entries.py"
_CATCHING_UP: Final = "tests/consistency/test_anti_entropy.py"

CLOCK: Final = (
    Mutant(
        "clock: a receipt forgets the sender's stamp",
        "kv_consistency.hlc",
        "wall, logical = far, remote.logical + 1",
        "wall, logical = own, self._logical + 1",
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: the wall going back takes the clock along",
        "kv_consistency.hlc",
        """
        if wall_ns > self._wall:
            wall, logical = wall_ns, 0
        """,
        """
        if wall_ns != self._wall:
            wall, logical = wall_ns, 0
        """,
        (f"{_HLC_INVARIANTS}::test_i6_a_wall_that_steps_back_never_moves_the_clock_back_and_each_time_is_counted",),
    ),
    Mutant(
        "clock: the counter is kept when the wall leads",
        "kv_consistency.hlc",
        """
        if wall_ns > self._wall:
            wall, logical = wall_ns, 0
        """,
        """
        if wall_ns > self._wall:
            wall, logical = wall_ns, self._logical
        """,
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: a refused stamp moves it all the same",
        "kv_consistency.hlc",
        """
        if ahead > self._offset_max:
            self._refused += 1
        """,
        """
        if ahead > self._offset_max:
            self._refused += 1
            self._wall = far
        """,
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: a receipt passes the bound on disk",
        "kv_consistency.hlc",
        """
            raise ClockBoundReachedError(bound_ns=self._bound)
        if wall_ns < self._reading:
            self._back_steps += 1
        if ahead > self._offset_seen:
        """,
        """
            pass
        if wall_ns < self._reading:
            self._back_steps += 1
        if ahead > self._offset_seen:
        """,
        (_HLC,),
    ),
    Mutant(
        "clock: a jump of the wall is taken for granted",
        "kv_consistency.hlc",
        "raise ClockJumpedError(ahead_ns=ahead, jump_max_ns=self._jump_max)",
        "self._reference = (now_ns, wall_ns)",
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: small jumps add up unseen",
        "kv_consistency.hlc",
        "if ahead > self._jump_max + drift and wall_ns > self._led + self._jump_max:",
        "if ahead > self._jump_max + drift and wall_ns > self._wall + self._jump_max:",
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: a receipt does not look at the wall",
        "kv_consistency.hlc",
        """
        if wall_ns > own and wall_ns > far:
            wall, logical = wall_ns, 0
        """,
        """
        if wall_ns > own and wall_ns > far:
            wall, logical = wall_ns - 1, limits.MAX_LOGICAL
        """,
        (f"{_HLC_INVARIANTS}::test_i3_a_stamp_is_not_before_the_reading_given",),
    ),
    Mutant(
        "clock: an overflow of the counter is cut off",
        "kv_consistency.hlc",
        """
                wall, logical = own, max(self._logical, remote.logical) + 1
            if logical > limits.MAX_LOGICAL:
                wall, logical = wall + 1, 0
        """,
        """
                wall, logical = own, max(self._logical, remote.logical) + 1
            if logical > limits.MAX_LOGICAL:
                wall, logical = wall, limits.MAX_LOGICAL
        """,
        (_HLC_INVARIANTS,),
    ),
    Mutant(
        "clock: a jump is written into the bound on disk",
        "kv_consistency.local",
        "replica.want_bound(replica.clock.wall_ns, out)",
        "replica.want_bound(at.wall_ns, out)",
        (_CLOCK_FAULTS,),
    ),
)

VECTORS: Final = (
    Mutant(
        "vector: merging keeps what is less far",
        "kv_consistency.version_vector",
        """
            if n > seen.get(origin, 0):
                seen[origin] = n
        return VersionVector(seen)
        """,
        """
            if n < seen.get(origin, n + 1):
                seen[origin] = n
        return VersionVector(seen)
        """,
        (_VECTOR,),
    ),
    Mutant(
        "vector: concurrent is taken for before",
        "kv_consistency.version_vector",
        "return Comparison.BEFORE if below else Comparison.CONCURRENT",
        "return Comparison.BEFORE",
        (_VECTOR,),
    ),
    Mutant(
        "vector: a difference does not tell what is gone",
        "kv_consistency.version_vector",
        "changed += [Reach(origin, 0) for origin in old if origin not in mine]",
        "",
        (_VECTOR,),
    ),
)

LOG: Final = (
    Mutant(
        "log: cut one update beyond what everybody has",
        "kv_consistency.update_log",
        "count = min(stable[origin] - log.low + 1, len(log.updates))",
        "count = min(stable[origin] - log.low + 2, len(log.updates))",
        (_LOG,),
    ),
    Mutant(
        "log: a slice is as long as asked for",
        "kv_consistency.update_log",
        "if taken > bytes_max and i > begin:",
        "if taken < 0:",
        (_LOG,),
    ),
    Mutant(
        "log: cut while a member has not said what it has",
        "kv_consistency.anti_entropy",
        """
            stable = stable.meet(known)
        return stable
        """,
        """
            stable = stable.merge(known)
        return stable
        """,
        (_LIVES, _CATCHING_UP),
    ),
    Mutant(
        "buffer: an update does not wait for what it follows",
        "kv_consistency.causal_buffer",
        """
                if update.deps and self._first_missing(origin, update) is not None:
                    break
                ready.append(update)
        """,
        """
                ready.append(update)
        """,
        (_BUFFER,),
    ),
    Mutant(
        "buffer: what waited for another origin is not woken",
        "kv_consistency.causal_buffer",
        "woken = self._woken(origin) if out and self._blocked else []",
        "woken: list[Origin] = []",
        (_BUFFER,),
    ),
    Mutant(
        "catching up: a gap is asked for of one peer only",
        "kv_consistency.anti_entropy",
        "untried = [name for name in candidates if name not in gap.tried]",
        "untried = list(candidates)",
        (_CATCHING_UP,),
    ),
)

HOLDERS: Final = (
    Mutant(
        "holders: one holder's removal takes the others'",
        "kv_consistency.claims",
        """
        gone = shelf.pop(hashes)
        if gone:
            self.size -= len(gone)
            out.append(ClaimsRemoved(holder, shelf.namespace, op.tier, op.shape, gone))
        """,
        """
        for holder, shelves in self._holders.items():
            for key, shelf in shelves.items():
                self._pop(holder, key, shelf, list(hashes), out)
        """,
        (_FIELD,),
    ),
    Mutant(
        "holders: a page of a snapshot overwrites what is newer",
        "kv_consistency.claims",
        "new = [block for block, row in rows.items() if (shelf.get(block) or 0) >> _N_SHIFT < row[0]]",
        "new = list(rows)",
        (_CLAIMS,),
    ),
    Mutant(
        "holders: an update replayed over a snapshot wins",
        "kv_consistency.claims",
        "keep = [i for i, block in enumerate(hashes) if (shelf.get(block) or 0) >> _N_SHIFT < n]",
        "keep = list(range(len(hashes)))",
        (_CLAIMS,),
    ),
    Mutant(
        "holders: a dead node's claims stay",
        "kv_consistency.remote",
        "replica.state.claims.drop_holder(origin, changes.claims)",
        "",
        ("tests/consistency/test_replication.py",),
    ),
    Mutant(
        "holders: a match goes on over a hole",
        "kv_consistency.claims",
        "return i, slowest",
        "continue",
        (_FIELD,),
    ),
    Mutant(
        "purge: a store that did not follow it survives",
        "kv_consistency.claims",
        """
        epoch = op.epoch
        if epoch < purges:
            return
        """,
        """
        epoch = max(op.epoch, purges)
        """,
        (_MANAGER, _FIELD),
    ),
    Mutant(
        "purge: a store does not say which purges it followed",
        "kv_consistency.state",
        """
                        if origin != self.origin:
                            self.owed[origin] = n
        """,
        "",
        (_MANAGER,),
    ),
    Mutant(
        "purge: what a disk kept is not told to others",
        "kv_consistency.local",
        "restored = replica.state.scopes.unpublished()",
        "restored = replica.state.scopes.unpublished()[:0]",
        (_FIELD,),
    ),
)

FENCING: Final = (
    Mutant(
        "fencing: a longer entry of a former owner wins",
        "kv_consistency.entries",
        """
        if epoch != old.home.epoch:
            return epoch > old.home.epoch
        """,
        "",
        (_ENTRIES,),
    ),
    Mutant(
        "fencing: a former owner may go on writing",
        "kv_consistency.local",
        """
        if epoch < row.home.epoch:
            raise FencedError(request_id=request_id, epoch=str(epoch), current=str(row.home.epoch))
        if row.ended:
        """,
        """
        if row.ended:
        """,
        (_MANAGER,),
    ),
    Mutant(
        "fencing: a reader for a former owner is served",
        "kv_consistency.replica",
        "raise FencedError(request_id=request_id, epoch=str(epoch), current=str(row.home.epoch))",
        "pass",
        (_MANAGER,),
    ),
    Mutant(
        "fencing: an entry may shrink",
        "kv_consistency.local",
        "raise ShrinkingUpdateError(request_id=request_id, have=have, new=new)",
        "pass",
        (_MANAGER,),
    ),
    Mutant(
        "fencing: a read does not wait for its token",
        "kv_consistency.manager",
        "replica.require(after)",
        "",
        (_MANAGER,),
    ),
    Mutant(
        "fencing: the dead rise",
        "kv_consistency.lives",
        """
        self._over[origin] = now_ns
        self._current.pop(origin, None)
        """,
        """
        self._over[origin] = now_ns
        """,
        (_LIVES,),
    ),
)

MUTANTS: Final = (*CLOCK, *VECTORS, *LOG, *HOLDERS, *FENCING, *POOL, *PREFIX, *TRANSFER, *SHARDS)
