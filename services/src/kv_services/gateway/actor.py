"""The gateway's cluster side as the HTTP front sees it: every open request, and what nodes say of them.

Requests begin and end here; each one's life is `request_actor`. What arrives is handed to the request it names, or told
back as unknown.
"""

import asyncio

from kv_bus.actor import Actor
from kv_bus.interface import Reply, Request
from kv_core.errors import error_from_wire
from kv_core.ids import RequestId
from kv_services.errors import PeerDiedError, UnknownRequestError
from kv_services.gateway.completer import GenerationRequest
from kv_services.gateway.errors import DrainingError, OverloadedError
from kv_services.gateway.request_actor import GatewayContext as GatewayContext
from kv_services.gateway.request_actor import RequestActor
from kv_services.gateway.routing_state import DecodeFailed, NodeDied, TokensArrived
from kv_services.gateway.stream import TokenStream
from kv_services.membership.state import Effect as MemberEffect
from kv_services.membership.state import MemberDied
from kv_services.messages import Ack, DecodeGaveUp, TokenBatch


class ClusterCompleter:
    """Turns requests into tokens on the cluster's nodes; a `Completer`. A supervised child: `start`, `run`, `close`."""

    def __init__(self, ctx: GatewayContext) -> None:
        self._ctx = ctx
        self._requests: dict[RequestId, RequestActor] = {}
        self._closing: dict[RequestId, asyncio.Task[None]] = {}
        self._closed: asyncio.Event | None = None

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    def submit(self, request: GenerationRequest) -> TokenStream:
        """See `Completer.submit`."""
        limit = self._ctx.config.limits.gateway_queue
        if self._closed is None or self._closed.is_set():
            raise DrainingError()
        if len(self._requests) >= limit:
            raise OverloadedError(what="the gateway", limit=limit, retry_after_s=1)
        actor = RequestActor(self._ctx, request, self._ended)
        self._requests[request.request_id] = actor
        self._ctx.metrics.running.set(len(self._requests))
        actor.begin()
        return actor.stream

    async def start(self) -> None:
        """Take the nodes' messages."""
        self._closed = asyncio.Event()
        self._ctx.bus.handle(TokenBatch, self._on_tokens)
        self._ctx.bus.handle(DecodeGaveUp, self._on_gave_up)
        self._ctx.cluster.on_change(self._on_member)

    async def run(self) -> None:
        """Return after `close`."""
        assert self._closed is not None
        await self._closed.wait()

    async def close(self) -> None:
        """End every request. Idempotent."""
        if self._closed is not None:
            self._closed.set()
        actors = list(self._requests.values())
        self._requests.clear()
        await asyncio.gather(*(actor.close() for actor in actors), *self._closing.values())

    def _on_tokens(self, request: Request[TokenBatch]) -> Reply:
        batch = request.message
        actor = self._actor(batch.request_id, batch.epoch)
        actor.post(TokensArrived(batch.epoch, batch.first_index, batch.tokens, batch.finish))
        return Ack()

    def _on_gave_up(self, request: Request[DecodeGaveUp]) -> Reply:
        message = request.message
        actor = self._actor(message.request_id, message.epoch)
        error = error_from_wire(message.error_code, message.error_fields)
        actor.post(DecodeFailed(message.epoch, error, message.may_retry))
        return Ack()

    def _actor(self, name: str, epoch: int) -> RequestActor:
        actor = self._requests.get(RequestId(name))
        if actor is None or epoch < actor.route.epoch:
            raise UnknownRequestError(node=self._ctx.bus.node_id, request_id=name, epoch=epoch)
        return actor

    def _on_member(self, effect: MemberEffect) -> None:
        if isinstance(effect, MemberDied):
            for request_id, actor in list(self._requests.items()):
                error = PeerDiedError(request_id=request_id, peer=effect.node_id, cause=effect.cause)
                actor.complete(NodeDied(effect.node_id, error))

    def _ended(self, request_id: RequestId) -> None:
        """A request is over: its actor is closed outside its own turn."""
        actor = self._requests.pop(request_id, None)
        self._ctx.metrics.running.set(len(self._requests))
        if actor is None:
            return
        task = asyncio.get_running_loop().create_task(self._close_one(actor), name=f"close:{request_id}")
        self._closing[request_id] = task
        task.add_done_callback(lambda _: self._closing.pop(request_id, None))

    async def _close_one(self, actor: RequestActor) -> None:
        # The client may still read what was decoded: feeding it needs no actor turn, only the stream.
        await Actor.close(actor)
