"""The faults of what holds and moves blocks: the pool, transfers, nonces, leases."""

from typing import Final

from tests.mutants.mutant import Mutant

_POOL: Final = "tests/prefix/test_block_pool.py"
_HOLDS: Final = "tests/prefix/test_pool_holds.py"
_TRANSFER: Final = "tests/transport/test_transfer_state.py"
_PUTS: Final = "tests/transport/test_puts.py"
_PURE: Final = "tests/transport/test_transport_pure.py"
_COPIES: Final = "tests/transport/test_shared_copies.py"
_DAMAGE: Final = "tests/transport/test_damage.py"
_SCHEDULER: Final = "tests/transport/test_scheduler.py"
_LEASE_ENDS: Final = "tests/transport/test_fetch.py::test_a_lease_ends_by_release_and_by_time"

POOL: Final = (
    Mutant(
        "pool: a slot handed out again keeps its generation",
        "kv_prefix.slots",
        "self.generation[slot] += 1",
        "",
        (_POOL, _HOLDS),
    ),
    Mutant(
        "pool: an ancestor of what is held may be evicted",
        "kv_prefix.slots",
        """
            self._busy_children[parent] += 1
            if self.refs[parent] or self._busy_children[parent] > 1:
                return
            slot = parent
        """,
        """
            return
        """,
        (_POOL, _HOLDS),
    ),
    Mutant(
        "pool: tokens are not compared",
        "kv_prefix.matching",
        "and slots.tokens[slot] == tokens",
        "",
        (_POOL, _HOLDS),
    ),
    Mutant(
        "pool: an ended lease can be renewed",
        "kv_prefix.pins",
        "if hold is None or hold.receipt.owner != receipt.owner or not (hold.receipt.until_ns or 0) > now_ns:",
        "if hold is None or hold.receipt.owner != receipt.owner or hold.receipt.until_ns is None:",
        (_POOL, _HOLDS),
    ),
    Mutant(
        "pool: a lease ends at its old time after renewal",
        "kv_prefix.pins",
        "if hold is not None and hold.receipt.until_ns == until_ns:",
        "if hold is not None:",
        (_POOL, _HOLDS),
    ),
    Mutant(
        "pool: a forked block is written in place",
        "kv_prefix.block_pool",
        "if self._slots.refs[source] > 1 or self._slots.committed[source]:",
        "if self._slots.committed[source]:",
        (_POOL, _HOLDS),
    ),
)

TRANSFER: Final = (
    Mutant(
        "transfer: memory is released while a unit is in flight",
        "kv_transport.transfer_state",
        """
        if self._flying:
            # The caller has its answer, the memory stays pinned until the transport lets go.
        """,
        """
        if self._flying > 1:
        """,
        (_TRANSFER,),
    ),
    Mutant(
        "transfer: done before the last unit may come",
        "kv_transport.transfer_state",
        "if not self._sealed or self.units_left:",
        "if self.units_left:",
        (_TRANSFER,),
    ),
    Mutant(
        "transfer: bad bytes are tried for ever",
        "kv_transport.transfer_state",
        "if attempt > limits.CHECKSUM_RETRIES_MAX:",
        "if attempt > 1 << 20:",
        (_TRANSFER,),
    ),
    Mutant(
        "transfer: a new link sends again what has arrived",
        "kv_transport.transfer_state",
        "effects = self._requeue(tuple(unit for unit in parked if unit not in arrived))",
        "effects = self._requeue(tuple(parked))",
        (_TRANSFER,),
    ),
    Mutant(
        "transfer: the first unit to end frees the others' memory",
        "kv_transport.transfer_state",
        """
        self._flying -= 1
        if self._flying:
            return []
        """,
        """
        self._flying -= 1
        """,
        (_TRANSFER,),
    ),
    Mutant(
        "replay: a nonce is accepted twice",
        "kv_transport.replay",
        "if is_forgotten(self.marks, nonce) or is_marked(self.marks, nonce):",
        "if is_forgotten(self.marks, nonce):",
        (_PURE,),
    ),
    Mutant(
        "replay: what is too old to know is accepted",
        "kv_transport.replay",
        "if is_forgotten(self.marks, nonce) or is_marked(self.marks, nonce):",
        "if is_marked(self.marks, nonce):",
        (_PURE,),
    ),
    Mutant(
        "replay: a put is announced again when it is tried again",
        "kv_transport.replay",
        """
        if is_marked(self.marks, put):
            return False
        """,
        "",
        (_PUTS,),
    ),
    Mutant(
        "replay: a put that is long past passes for one that was announced just now",
        "kv_transport.replay",
        "_clear(marks, newest + 1, number, window)",
        "pass",
        (_PUTS,),
    ),
    Mutant(
        "lease: its time does not end it",
        "kv_transport.leases",
        "self._timers[ticket] = self._loop.call_later(lease_ms / 1000, partial(self.release, ticket))",
        "self._timers[ticket] = self._loop.call_later(lease_ms * 1000, partial(self.release, ticket))",
        (_LEASE_ENDS,),
    ),
    Mutant(
        "lease: readers may go on after its release",
        "kv_transport.leases",
        "self._table.end(ticket)",
        "",
        (_LEASE_ENDS,),
    ),
    Mutant(
        "shm: a slot that was given to other content is written",
        "kv_transport.backends.shm_copies",
        "require_generations(self._arena, ticket, unit.start, unit.end)",
        "pass",
        (_DAMAGE,),
    ),
    Mutant(
        "shm: what arrived is not compared",
        "kv_transport.backends.shm_copies",
        "if checks != expected:",
        "if False:",
        (_DAMAGE,),
    ),
    Mutant(
        "copy: who finds nothing left speaks for a thread that is within its cell",
        "kv_transport.kernels",
        "last = inside == 1 and not over",
        "last = not over",
        (_COPIES,),
    ),
    Mutant(
        "copy: one that is stopped goes on",
        "kv_transport.kernels",
        "if stop or following >= len(table):",
        "if following >= len(table):",
        (_COPIES,),
    ),
    Mutant(
        "copy: its memory is held when it has ended",
        "kv_transport.copying",
        """
        if outcome is None:
            return False
        self._views = None
        """,
        """
        if outcome is None:
            return False
        """,
        (_COPIES,),
    ),
    Mutant(
        "scheduler: bytes in flight know no bound",
        "kv_transport.scheduler",
        "return len(self._flying) + self._passing < self._window and self._flying_nbytes < self._window_bytes",
        "return len(self._flying) + self._passing < self._window",
        (_SCHEDULER,),
    ),
)
