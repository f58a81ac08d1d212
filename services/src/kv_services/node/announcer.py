"""Publishes what one role of a node computes, from its beginning to its end, however that ends.

What others make of it is theirs (`in_flight_watch`). A node that dies withdraws nothing: what it announced ends with
its membership, or with its time.
"""

from typing import Final

from kv_core.block_hashes import BlockHashes
from kv_core.ids import RequestId
from kv_services.messages import ANNOUNCED_BLOCKS_MAX, PrefixComputed, PrefixComputing
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.context import NodeContext
from kv_services.node.pull_cost import FETCH_OVERHEAD_NS

ANNOUNCED_SLACK_NS: Final = 1_000_000_000
"""An announcement ends after twice the expected time and this."""


class Announcer:
    """The announcements of one role.

    Args:
        role: names it, since a node's roles may compute for the same request.
    """

    def __init__(self, ctx: NodeContext, role: str) -> None:
        self._ctx = ctx
        self._role = role
        self._open: set[tuple[RequestId, int]] = set()

    def __len__(self) -> int:
        """Announcements that were not withdrawn."""
        return len(self._open)

    def announce(self, effect: AnnounceBlocks) -> None:
        """Say what is being computed, where it takes long enough for somebody to wait for it."""
        ready_ns = int(effect.num_tokens * self._ctx.cost.compute_ns_per_token)
        left_ns = effect.deadline_ns - self._ctx.clock.monotonic_ns()
        if ready_ns < FETCH_OVERHEAD_NS or left_ns <= ready_ns:
            # Nobody would wait for what is computed more quickly than it is fetched.
            return
        names = BlockHashes.of(effect.block_hashes[:ANNOUNCED_BLOCKS_MAX]).packed
        until_ns = min(2 * ready_ns + ANNOUNCED_SLACK_NS, left_ns)
        self._open.add((effect.request_id, effect.epoch))
        self._ctx.bus.publish(PrefixComputing(self._computation(effect), names, ready_ns, until_ns))

    def withdraw(self, effect: WithdrawBlocks) -> None:
        """Say that it is over, if it was announced."""
        key = (effect.request_id, effect.epoch)
        if key not in self._open:
            return
        self._open.discard(key)
        # First the claims of what was computed, then the word that follows them.
        self._ctx.flush_pool_events()
        self._ctx.replica.say()
        manager = self._ctx.replica.manager
        after = manager.token_of_claims(manager.origin).to_bytes()
        self._ctx.bus.publish(PrefixComputed(self._computation(effect), after))

    def _computation(self, effect: AnnounceBlocks | WithdrawBlocks) -> str:
        return f"{self._role}/{effect.request_id}/{effect.epoch}"
