"""Keeps the prompt of a request that asked for it before others in this node's memory, once it is over."""

import logging

from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_services.messages import Retention
from kv_services.node.context import NodeContext

_log = logging.getLogger(__name__)


def retain_prompt(ctx: NodeContext, namespace: Namespace, tokens: bytes, retention: Retention) -> int:
    """Retain what is here of a prompt's full blocks; how many that are, within the quotas of tenant and pool.

    Args:
        tokens: uint32, little-endian.
    """
    names = hash_tokens(namespace, tokens)
    # A pool leaves a prompt's last token out, so one is put behind them.
    match = ctx.pool.match(namespace.digest, names, tokens[: 4 * len(names) * ctx.block_size] + bytes(4))
    until_ns = ctx.clock.monotonic_ns() + retention.ttl_ns
    count = ctx.pool.retain(match, priority=retention.priority, until_ns=until_ns)
    _log.debug("prompt retained blocks=%d of=%d priority=%d", count, len(names), retention.priority)
    return count
