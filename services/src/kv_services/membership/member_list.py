"""Makes one process's members those that a discovery service lists, whichever service that is.

What is listed comes in as events of `discovery_state`; whose heartbeats are listened for, and where, goes out to the
bus and the view of the cluster. Who lives is heard from that view. Decisions are `Directory`'s.
"""

import asyncio
import logging

from kv_bus.interface import Bus, PeerAddress
from kv_core.ids import NodeId
from kv_services.config import NodeConfig
from kv_services.membership.actor import ClusterView
from kv_services.membership.discovery_state import AddMember, Directory, Event, LifeBegan, LifeEnded, RemoveMember
from kv_services.membership.state import Effect as MemberEffect
from kv_services.membership.state import MemberDied, MemberUp

_log = logging.getLogger(__name__)


class MemberList:
    """See the module. Those whom the view knows when this is made are the cluster file's."""

    def __init__(self, own: NodeId, bus: Bus, cluster: ClusterView) -> None:
        self._bus = bus
        self._cluster = cluster
        self._directory = Directory(own, frozenset(cluster.roles))

    def members(self) -> list[NodeConfig]:
        """Processes that are members by their record."""
        return [record.config() for record in self._directory.members()]

    def attach(self) -> None:
        """Hear of lives from now on, and say whose records have gone."""
        self._cluster.on_change(self._on_member)
        self._cluster.view.is_unlisted = self._directory.is_unlisted

    def hear(self, event: Event) -> None:
        """What is listed has changed, or who lives."""
        for effect in self._directory.step(event):
            match effect:
                case AddMember(record):
                    node = record.config()
                    _log.info("member listed node=%s role=%s bus=%s", node.id, node.role.value, node.bus_endpoint)
                    self._bus.add_peer(PeerAddress(node.node_id, node.bus_endpoint, node.events_endpoint))
                    self._cluster.add_member(node.node_id, node.role)
                case RemoveMember(node_id):
                    _log.info("member gone node=%s", node_id)
                    self._cluster.remove_member(node_id)
                    self._bus.remove_peer(node_id)

    def _on_member(self, effect: MemberEffect) -> None:
        match effect:
            case MemberUp(node_id):
                self.hear(LifeBegan(node_id))
            case MemberDied(node_id):
                # In a later turn: listeners of this death still ask what the member was.
                asyncio.get_running_loop().call_soon(self._ended, node_id)
            case _:
                pass

    def _ended(self, node_id: NodeId) -> None:
        if node_id not in self._cluster.view.alive():
            self.hear(LifeEnded(node_id))
