"""What the replica learns of claims, told to the prefix index."""

from kv_consistency.effects import ClaimsAdded, ClaimsRemoved, HolderDropped
from kv_core.block_hashes import BlockHashes
from kv_prefix.events import Tier
from kv_prefix.prefix_index import Holder, PrefixIndex


def feed(index: PrefixIndex, change: ClaimsAdded | ClaimsRemoved | HolderDropped) -> None:
    """Apply one change of claims."""
    holder = Holder(change.holder.node, change.holder.incarnation)
    match change:
        case ClaimsAdded(_, _, tier, _, hashes, checks, positions):
            consecutive = isinstance(positions, range)
            index.stored(holder, Tier(tier), BlockHashes.of_columns(hashes, checks), consecutive=consecutive)
        case ClaimsRemoved(_, _, tier, _, hashes):
            index.removed(holder, Tier(tier), BlockHashes.of_columns(hashes, [0] * len(hashes)))
        case HolderDropped():
            index.remove_holder(holder)
