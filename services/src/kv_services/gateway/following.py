"""The engines outside the cluster whose KV a gateway's index follows, and what operators are told of their blocks."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.config import ClusterConfig
from kv_services.gateway.prefix_lookup import asked_prompt
from kv_services.kv_events.engine_explain import explain_followed
from kv_services.kv_events.follow import EngineEvents
from kv_services.kv_events.follow_state import EngineFollower
from kv_services.past_requests import PastRequests
from kv_services.tenants import OPEN_TENANT, namespace_salt

BLOCKS_A_TURN: Final = 1024
"""Blocks that are explained before the gateway's streams have their turn again: a few milliseconds."""


def followed_engines(config: ClusterConfig, index: PrefixIndex, weights_revision: str) -> list[EngineEvents]:
    """One follower for each engine of the cluster file. They serve the cluster's model, in blocks of its size."""
    secrets = {tenant.id: tenant.salt for tenant in config.tenants}
    engines = []
    for engine in config.kv_events.follow:
        tenant = engine.tenant or OPEN_TENANT
        namespace = Namespace(
            config.model.id,
            weights_revision,
            salt=namespace_salt(tenant, secrets.get(tenant, ""), None),
            dtype=config.model.dtype,
            block_size=config.model.block_size,
        )
        holder = Holder(NodeId(engine.name), Incarnation(1))
        follower = EngineFollower(namespace, dict(engine.loras))
        engines.append(EngineEvents(holder, engine.events, engine.replay, follower, index))
    return engines


class FollowedExplain:
    """Says of each followed engine what became of a prompt's blocks there; changes nothing."""

    def __init__(
        self,
        config: ClusterConfig,
        weights_revision: str,
        engines: Sequence[EngineEvents],
        index: PrefixIndex,
        past: PastRequests | None,
    ) -> None:
        self._config, self._weights_revision = config, weights_revision
        self._engines, self._index, self._past = engines, index, past

    async def answer(self, body: bytes) -> bytes:
        """The verdicts on the prompt in that body (`PromptAsk`), engine by engine, as JSON.

        Raises:
            InvalidRequestError: no such body, tenant or prompt.
        """
        namespace, tokens = asked_prompt(body, self._config, self._weights_revision, self._past)
        engines = {}
        for engine in self._engines:
            rows: list[dict[str, object]] = []
            name = engine.holder.node
            for row in explain_followed(engine.holder, engine.follower, self._index, namespace, tokens):
                rows.append(
                    {
                        "block": row.block_idx,
                        "verdict": row.verdict.value,
                        "detail": row.detail,
                        "holders": [name] if row.held else [],
                    }
                )
                if len(rows) % BLOCKS_A_TURN == 0:
                    await asyncio.sleep(0)
            engines[name] = {"tokens": len(tokens) // 4, "block_size": namespace.block_size, "blocks": rows}
        return msgspec.json.encode({"engines": engines})
