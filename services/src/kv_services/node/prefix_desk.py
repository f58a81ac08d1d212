"""What an operator asks a node about prefixes: keep this one, let go of it, forget all of those, why did it miss.

Prompts come as tokens of a tenant, or by the id of a past request; the node makes the namespace itself, so no salt
travels. Pins live in this process: after a restart they are set again.

O1: one tenant's pins never exceed its `pin_quota` on this node, nor all together the pool's.
O2: a pin holds full blocks that are here when it is set; it says how many of the prompt's those are.
O3: what is purged is pinned no longer: it would keep memory for blocks that nobody can find.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kv_consistency.update import scope_id
from kv_core import limits as core_limits
from kv_core.errors import KVError
from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.errors import PinQuotaExceededError
from kv_prefix.events import BlockRemoved, PoolEvent, RemovalReason
from kv_prefix.explain import Explainer
from kv_prefix.in_flight import InFlight
from kv_prefix.pins import Receipt
from kv_services.node.context import NodeContext
from kv_services.prompt_asks import PromptAsk, UnknownPromptError, tenant_namespace, tenant_secret
from kv_services.tenants import OPEN_TENANT, tenant_mark, tenant_scope

PROMOTE_NS: Final = 10_000_000_000

_log = logging.getLogger(__name__)


class UnknownPinError(KVError):
    """Nothing is pinned under that name here."""

    code = 7072
    template = "nothing is pinned as {name!r}"


class PinAsk(PromptAsk, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pin a prompt's blocks under a name; a name that is in use is pinned anew."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]


class UnpinAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let go of what is pinned under a name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]


class PurgeAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget, on every node and in every tier, what lies below this."""

    what: Literal["all", "tenant", "weights"]
    value: Annotated[str, Meta(max_length=core_limits.MAX_NAME_BYTES)] = ""


@dataclass(frozen=True, slots=True)
class _Pin:
    tenant: str
    namespace: bytes
    receipt: Receipt
    num_blocks: int


class PrefixDesk:
    """The operators' requests about prefixes of one node. `actions` are for the side HTTP server."""

    def __init__(self, ctx: NodeContext, weights_revision: str, in_flight: InFlight) -> None:
        self._ctx = ctx
        self._in_flight = in_flight
        self._weights_revision = weights_revision
        self._pins: dict[str, _Pin] = {}
        ctx.listeners.append(self._hear)

    def actions(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """What may be asked for, by path."""
        return {
            "/prefix/pin": self._pin,
            "/prefix/unpin": self._unpin,
            "/prefix/purge": self._purge,
            "/prefix/explain": self._explain,
        }

    def close(self) -> None:
        """Let go of every pin. Idempotent."""
        while self._pins:
            self._ctx.pool.release(self._pins.popitem()[1].receipt)

    def _hear(self, events: Sequence[PoolEvent]) -> None:
        """The pool stored or removed blocks (O3)."""
        purged = {e.namespace for e in events if isinstance(e, BlockRemoved) and e.reason is RemovalReason.PURGED}
        for name in [name for name, pin in self._pins.items() if pin.namespace in purged]:
            _log.info("pin ended name=%s cause=its blocks were purged", name)
            self._ctx.pool.release(self._pins.pop(name).receipt)

    async def _pin(self, body: bytes) -> bytes:
        ask = msgspec.json.decode(body, type=PinAsk)
        ctx, (namespace, tokens) = self._ctx, self._prompt(ask)
        await ctx.tiers.promote(namespace, tokens + bytes(4), ctx.clock.monotonic_ns() + PROMOTE_NS)
        names = hash_tokens(namespace, tokens)
        # A pool leaves a prompt's last token out, so one is put behind them.
        match = ctx.pool.match(namespace.digest, names, tokens[: 4 * len(names) * ctx.block_size] + bytes(4))
        before = self._pins.get(ask.name)
        self._require_quota(ask.tenant, ask.name, len(match.refs))
        receipt = ctx.pool.pin(f"operator {ask.name}", match)
        if before is not None:
            ctx.pool.release(before.receipt)
        self._pins[ask.name] = _Pin(ask.tenant, namespace.digest, receipt, len(match.refs))
        ctx.flush_pool_events()
        return msgspec.json.encode({"pinned": len(match.refs), "of": len(names)})

    async def _unpin(self, body: bytes) -> bytes:
        ask = msgspec.json.decode(body, type=UnpinAsk)
        pin = self._pins.pop(ask.name, None)
        if pin is None:
            raise UnknownPinError(name=ask.name)
        self._ctx.pool.release(pin.receipt)
        self._ctx.flush_pool_events()
        return msgspec.json.encode({"unpinned": pin.num_blocks})

    async def _purge(self, body: bytes) -> bytes:
        ask = msgspec.json.decode(body, type=PurgeAsk)
        model = self._ctx.config.model.id
        if ask.what == "all":
            scope = scope_id("model", model)
        elif ask.what == "tenant":
            scope = tenant_scope(tenant_mark(ask.value, tenant_secret(self._ctx.config, ask.value)))
        else:
            scope = scope_id("weights", f"{model}@{ask.value or self._weights_revision}")
        self._ctx.replica.purge([scope])
        self._ctx.tiers.tick()
        return msgspec.json.encode({"purged": ask.what})

    async def _explain(self, body: bytes) -> bytes:
        ask = msgspec.json.decode(body, type=PromptAsk)
        namespace, tokens = self._prompt(ask)
        ctx, config = self._ctx, self._ctx.config
        tenants = [OPEN_TENANT, *(tenant.id for tenant in config.tenants)]
        others = [self._namespace(tenant, None) for tenant in tenants if not config.tenants or tenant != OPEN_TENANT]
        others = [other for other in others if other != namespace]
        explainer = Explainer(ctx.pool, ctx.tiers.removals, ctx.index, others, self._in_flight)
        rows = [
            {
                "block": row.block_idx,
                "verdict": row.verdict.value,
                "detail": row.detail,
                "holders": list(row.holders),
            }
            for row in explainer.explain(namespace, tokens)
        ]
        return msgspec.json.encode({"tokens": len(tokens) // 4, "block_size": ctx.block_size, "blocks": rows})

    def _prompt(self, ask: PromptAsk) -> tuple[Namespace, bytes]:
        """The namespace and tokens that are meant.

        Raises:
            UnknownPromptError, UnknownTenantError: there are none.
        """
        if ask.request_id:
            past = self._ctx.past.get(ask.request_id)
            if past is None:
                raise UnknownPromptError(cause=f"request {ask.request_id!r} was not here lately")
            return past
        tokens = ask.token_bytes()
        return self._namespace(ask.tenant, ask.cache_salt), tokens

    def _namespace(self, tenant: str, cache_salt: str | None) -> Namespace:
        return tenant_namespace(self._ctx.config, self._weights_revision, tenant, cache_salt)

    def _require_quota(self, tenant: str, name: str, need: int) -> None:
        quota = next((one.pin_quota for one in self._ctx.config.tenants if one.id == tenant), None)
        if quota is None:
            return
        used = sum(pin.num_blocks for key, pin in self._pins.items() if pin.tenant == tenant and key != name)
        if used + need > quota:
            raise PinQuotaExceededError(need=need, used=used, quota=quota)
