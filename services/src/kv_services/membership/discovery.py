"""Keeps this process listed in etcd, and its members those that etcd lists.

One session is: a lease, this process's record under it, the listing as a whole, then a watch from its revision on while
the lease is renewed. Whatever goes wrong ends the session, and another begins after a pause, at the next endpoint;
meanwhile everybody goes on with the members he knows, so a lost etcd stops no request. What follows from what etcd says
is for `MemberList`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

import aiohttp

from kv_bus.interface import Bus
from kv_core.ids import Incarnation, NodeId
from kv_services.config import ClusterConfig, NodeConfig
from kv_services.membership.actor import ClusterView
from kv_services.membership.discovery_state import Listing, ListingLost, RecordGone, RecordPut
from kv_services.membership.etcd_client import EtcdClient, EtcdError, KeyDeleted, KeyEvent, KeyPut
from kv_services.membership.member_list import MemberList
from kv_services.membership.records import NodeRecord, RecordError, decode_record, encode_record, record_of

PAUSE_FIRST_S: Final = 0.2
PAUSE_MAX_S: Final = 2.0
REVOKE_TIMEOUT_S: Final = 1.0

_log = logging.getLogger(__name__)


class EtcdDiscovery:
    """A supervised child: `start`, `run`, `close`."""

    def __init__(
        self, config: ClusterConfig, node: NodeConfig, incarnation: Incarnation, bus: Bus, cluster: ClusterView
    ) -> None:
        self._settings = config.etcd
        self._prefix = key_prefix(config)
        self._allow_remote = config.cluster.allow_remote
        self._record = record_of(node, incarnation)
        self._list = MemberList(node.node_id, bus, cluster)
        self._closed: asyncio.Event | None = None
        self._lease: tuple[EtcdClient, str] | None = None
        self.problem = ""
        self.sessions = 0

    @property
    def members(self) -> list[NodeConfig]:
        """Processes that are members by their record."""
        return self._list.members()

    async def start(self) -> None:
        self._closed = asyncio.Event()
        self._list.attach()

    async def run(self) -> None:
        """Hold one session after another until closed."""
        assert self._closed is not None
        endpoints, turn, pause_s = self._settings.endpoints, 0, PAUSE_FIRST_S
        async with aiohttp.ClientSession() as http:
            while not self._closed.is_set():
                client = EtcdClient(http, endpoints[turn % len(endpoints)])
                ended = asyncio.ensure_future(self._closed.wait())
                session = asyncio.ensure_future(self._session(client))
                await asyncio.wait((ended, session), return_when=asyncio.FIRST_COMPLETED)
                for one in (ended, session):
                    one.cancel()
                _, outcome = await asyncio.gather(ended, session, return_exceptions=True)
                if self._closed.is_set():
                    break
                if not isinstance(outcome, EtcdError):
                    assert isinstance(outcome, BaseException), outcome
                    raise outcome
                self._list.hear(ListingLost())
                if not self.problem:
                    _log.warning("etcd is lost, members stay as they are: %s", outcome)
                    pause_s = PAUSE_FIRST_S
                self.problem = str(outcome)
                turn += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            await self._leave()

    async def close(self) -> None:
        """End the session; `run` takes this process off the list before it returns. Idempotent."""
        if self._closed is not None:
            self._closed.set()

    async def _session(self, client: EtcdClient) -> None:
        """Hold one session until something goes wrong.

        Raises:
            EtcdError: what went wrong.
        """
        lease = await client.grant(self._settings.lease_s)
        self._lease = (client, lease)
        await client.put(self._prefix + self._record.node_id, encode_record(self._record), lease)
        listed, revision = await client.listing(self._prefix)
        records = [record for key, value in listed.items() if (record := self._read(key, value)) is not None]
        self._list.hear(Listing(tuple(records)))
        self.sessions += 1
        if self.problem:
            _log.info("etcd is back, it lists %d processes", len(records))
            self.problem = ""
        renewing = asyncio.ensure_future(self._renew(client, lease))
        following = asyncio.ensure_future(self._follow(client, revision + 1))
        try:
            done, _ = await asyncio.wait((renewing, following), return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            renewing.cancel()
            following.cancel()
            await asyncio.gather(renewing, following, return_exceptions=True)

    async def _renew(self, client: EtcdClient, lease: str) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            if not await client.renew(lease):
                raise EtcdError(endpoint=client.endpoint, cause="the lease has ended")

    async def _follow(self, client: EtcdClient, revision: int) -> None:
        async for events in client.watch(self._prefix, revision):
            for event in events:
                self._hear(event)

    def _hear(self, event: KeyEvent) -> None:
        match event:
            case KeyPut(key, value):
                record = self._read(key, value)
                if record is not None:
                    self._list.hear(RecordPut(record))
            case KeyDeleted(key):
                self._list.hear(RecordGone(NodeId(key.removeprefix(self._prefix))))

    def _read(self, key: str, value: bytes) -> NodeRecord | None:
        """The record under a key; None, and a line in the log, when it is none."""
        try:
            return decode_record(key.removeprefix(self._prefix), value, allow_remote=self._allow_remote)
        except RecordError as error:
            _log.warning("%s", error)
            return None

    async def _leave(self) -> None:
        """Take this process off the list, so that nobody waits for its lease to end."""
        if self._lease is None:
            return
        client, lease = self._lease
        timeout = aiohttp.ClientTimeout(total=REVOKE_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                await EtcdClient(http, client.endpoint).revoke(lease)
        except EtcdError as error:
            _log.info("still listed until its lease ends: %s", error)


def key_prefix(config: ClusterConfig) -> str:
    """Below which key a cluster's records lie: clusters of different names do not meet."""
    return f"/kv-fabric/{config.cluster.name}/nodes/"


async def listed_nodes(config: ClusterConfig) -> Mapping[str, NodeConfig]:
    """What etcd lists now, for tools that are no member.

    Raises:
        EtcdError: no endpoint answers.
    """
    last: EtcdError | None = None
    prefix = key_prefix(config)
    async with aiohttp.ClientSession() as http:
        for endpoint in config.etcd.endpoints:
            try:
                listed, _ = await EtcdClient(http, endpoint).listing(prefix)
            except EtcdError as error:
                last = error
                continue
            nodes: dict[str, NodeConfig] = {}
            for key, value in listed.items():
                try:
                    record = decode_record(key.removeprefix(prefix), value, allow_remote=config.cluster.allow_remote)
                except RecordError as error:
                    _log.warning("%s", error)
                    continue
                nodes[record.node_id] = record.config()
            return nodes
    assert last is not None
    raise last
