"""Two replicas, a lost message, and a read that waits for what it follows. Run: python two_replicas.py"""

from kv_consistency.effects import BroadcastUpdates, Effect, SendTo, WaiterFailed, WaiterReady
from kv_consistency.errors import StaleReplicaError
from kv_consistency.events import GapNoticed, Instant, PeerJoined, Received, Tick, WaitFor
from kv_consistency.manager import KvCacheConsistencyManager
from kv_core.ids import Incarnation, NodeId, RequestId

PREFILL, DECODE = NodeId("prefill"), NodeId("decode")
REQUEST = RequestId("chat-1")
now = Instant(now_ns=0, wall_ns=1_700_000_000_000_000_000)

replicas = {name: KvCacheConsistencyManager(name, Incarnation(1)) for name in (PREFILL, DECODE)}
told: list[str] = []


def deliver(sender: NodeId, effects: list[Effect], *, lose_broadcasts: bool = False) -> None:
    """Perform one replica's effects: what it sends reaches the other one, unless it is lost."""
    receiver = DECODE if sender == PREFILL else PREFILL
    for effect in effects:
        if isinstance(effect, WaiterReady | WaiterFailed):
            told.append(type(effect).__name__)
        if isinstance(effect, SendTo) or (isinstance(effect, BroadcastUpdates) and not lose_broadcasts):
            message = effect.batch if isinstance(effect, BroadcastUpdates) else effect.message
            deliver(receiver, replicas[receiver].step(Received(now, sender, message)))


for name, replica in replicas.items():
    deliver(name, replica.step(Tick(now)))
for name, peer in ((PREFILL, DECODE), (DECODE, PREFILL)):
    deliver(name, replicas[name].step(PeerJoined(now, peer, Incarnation(1))))

# The prefill node says that 48 tokens of KV are readable on both; the message is lost.
version = replicas[PREFILL].register_update(REQUEST, 48, [PREFILL, DECODE], at=now)
deliver(PREFILL, replicas[PREFILL].drain(), lose_broadcasts=True)
token = replicas[PREFILL].token(REQUEST)

# A read that carries the token is not answered from the past.
try:
    replicas[DECODE].verify_readable(REQUEST, 48, after=token, at=now)
except StaleReplicaError as error:
    print("not yet:", type(error).__name__)

# It waits, the gap is noticed and filled, and it sees exactly what was registered.
deliver(DECODE, replicas[DECODE].step(WaitFor(now, 1, token, now.now_ns + 1_000_000_000, REQUEST, 48)))
deliver(DECODE, replicas[DECODE].step(GapNoticed(now, PREFILL)))
for _ in range(40):
    now = Instant(now.now_ns + 25_000_000, now.wall_ns + 25_000_000)
    for name, replica in replicas.items():
        deliver(name, replica.step(Tick(now)))
assert told == ["WaiterReady"], told
assert replicas[DECODE].verify_readable(REQUEST, 48, after=token, at=now) == version
print("readable:", replicas[DECODE].entry(REQUEST).seq_len, "tokens, version as registered")
