"""Answers operators who holds how much of a prompt, as this gateway's index has it.

The index of a gateway has all nodes of the cluster and the engines outside it that are followed (`kv_events.follow`).
Those are listed and never chosen: a request cannot be sent to them through this cluster.
"""

import msgspec

from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.events import Tier
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import ClusterConfig
from kv_services.gateway.errors import InvalidRequestError
from kv_services.in_flight_watch import InFlightWatch
from kv_services.past_requests import PastRequests
from kv_services.prompt_asks import PromptAsk, UnknownPromptError, UnknownTenantError, tenant_namespace


def asked_prompt(
    body: bytes, config: ClusterConfig, weights_revision: str, past: PastRequests | None = None
) -> tuple[Namespace, bytes]:
    """The namespace and the tokens (uint32 little-endian) of the prompt that a body means (`PromptAsk`).

    Args:
        past: where requests are remembered, if one may be asked for by its id.

    Raises:
        InvalidRequestError: no such body, tenant or prompt.
    """
    try:
        ask = msgspec.json.decode(body, type=PromptAsk)
        if past is not None and ask.request_id:
            found = past.get(ask.request_id)
            if found is None:
                raise UnknownPromptError(cause=f"request {ask.request_id!r} was not here lately")
            return found
        return tenant_namespace(config, weights_revision, ask.tenant, ask.cache_salt), ask.token_bytes()
    except (msgspec.MsgspecError, UnknownPromptError, UnknownTenantError) as error:
        raise InvalidRequestError(param="", detail=str(error)) from None


class PrefixLookup:
    """The lookups of one gateway; quick, and changes nothing."""

    def __init__(
        self, config: ClusterConfig, index: PrefixIndex, weights_revision: str, in_flight: InFlightWatch
    ) -> None:
        self._config, self._index, self._in_flight = config, index, in_flight
        self._weights_revision = weights_revision
        self._followed = {engine.name for engine in config.kv_events.follow}

    def answer(self, body: bytes) -> bytes:
        """The holders of the prompt in that body (`PromptAsk`), deepest first, as JSON.

        Raises:
            InvalidRequestError: no such body, tenant or prompt.
        """
        namespace, tokens = asked_prompt(body, self._config, self._weights_revision)
        names = hash_tokens(namespace, tokens)
        found = self._index.lookup(names)
        held = {match.holder.node: match.num_blocks for match in found}
        holders = [
            {
                "node": match.holder.node,
                "blocks": match.num_blocks,
                "by_tier": {tier.name.lower(): match.by_tier[tier] for tier in Tier if match.by_tier[tier]},
                "takes_requests": match.holder.node not in self._followed,
            }
            for match in found
        ]
        answer = {
            "blocks": len(names),
            "block_size": namespace.block_size,
            "holders": holders,
            "being_computed": self._in_flight.coming(names, held),
        }
        return msgspec.json.encode(answer)
