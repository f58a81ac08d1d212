"""One hand-over on the side that receives it, as a pure machine.

It decides when a layer is ready, when the hand-over has failed, and, apart from that, when the slots are free: only by
completion or by a fence that proves that no writer can reach them any more. A writer that cannot be fenced in time
(it is stopped, not dead) puts the slots in quarantine until it can.

N1: the caller is answered exactly once. N2: `Release` comes once, after completion or `Fenced`. N3: no layer becomes
ready after a failure.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kv_core.errors import KVError
from kv_transport.errors import InvalidTransition


class InboundState(Enum):
    """Where a hand-over is, seen from the receiver."""

    WAITING = "waiting"
    """Granted; nobody has begun."""

    OPEN = "open"
    """A writer is at work."""

    ORPHANED = "orphaned"
    """The writer's link broke; it may come back by another one for a moment."""

    DONE = "done"
    FENCING = "fencing"
    """Failed; the writer is being shut out."""

    QUARANTINED = "quarantined"
    """Failed, and a writer that does not answer might still write."""

    RELEASED = "released"
    """Failed, and nobody can write any more."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A writer announced itself, for the first time or by another link."""


@dataclass(frozen=True, slots=True)
class LayerDone:
    """The last unit of a layer was verified."""

    layer: int


@dataclass(frozen=True, slots=True)
class WriterLost:
    """The writer's link broke; `dead` if its process is known to be gone."""

    error: KVError
    dead: bool


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The writer did not come back in time."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Cancelled or out of time."""

    error: KVError


@dataclass(frozen=True, slots=True)
class Fenced:
    """No writer can reach the slots any more."""


@dataclass(frozen=True, slots=True)
class FenceTimedOut:
    """The fence did not hold in time."""


Event = Opened | LayerDone | WriterLost | GraceOver | Stopped | Fenced | FenceTimedOut


@dataclass(frozen=True, slots=True)
class LayerReady:
    """Wake who waits for this layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class ArmGrace:
    """Come back with `GraceOver`."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Shut the writer out; come back with `Fenced`, or with `FenceTimedOut` and `Fenced` later."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """Every layer is there."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell everybody why not."""

    error: KVError


@dataclass(frozen=True, slots=True)
class Quarantine:
    """List the slots as unusable."""


@dataclass(frozen=True, slots=True)
class Release:
    """The slots belong to their owner again."""


Effect = LayerReady | ArmGrace | Fence | Succeed | Fail | Quarantine | Release

_RUNNING: Final = (InboundState.WAITING, InboundState.OPEN, InboundState.ORPHANED)


class InboundTransfer:
    """See the module."""

    def __init__(self, name: str, layers: range) -> None:
        self.name: Final = name
        self.state = InboundState.WAITING
        self.error: KVError | None = None
        self._missing = dict.fromkeys(layers)
        self._lost: KVError | None = None

    @property
    def missing_layers(self) -> list[int]:
        return list(self._missing)

    def step(self, event: Event) -> list[Effect]:
        """The only way to change the state."""
        if self.state in _RUNNING:
            return self._running(event)
        match self.state, event:
            case InboundState.FENCING, FenceTimedOut():
                self.state = InboundState.QUARANTINED
                return [Quarantine()]
            case ((InboundState.FENCING | InboundState.QUARANTINED), Fenced()):
                self.state = InboundState.RELEASED
                return [Release()]
            case _, Fenced():
                raise InvalidTransition(machine=f"inbound {self.name}", state=self.state.value, event=repr(event))
            case _:
                # Late news of a hand-over that is over: its layers, links and timers no longer matter.
                return []

    def _running(self, event: Event) -> list[Effect]:
        match event:
            case Opened():
                self.state = InboundState.OPEN
                return []
            case LayerDone(layer):
                return self._layer_done(layer)
            case WriterLost(error, dead):
                if dead:
                    return self._fail(error)
                if self.state is InboundState.ORPHANED:
                    return []
                self.state = InboundState.ORPHANED
                self._lost = error
                return [ArmGrace()]
            case GraceOver():
                if self.state is InboundState.ORPHANED and self._lost is not None:
                    return self._fail(self._lost)
                return []
            case Stopped(error):
                return self._fail(error)
            case Fenced() | FenceTimedOut():
                raise InvalidTransition(machine=f"inbound {self.name}", state=self.state.value, event=repr(event))

    def _layer_done(self, layer: int) -> list[Effect]:
        if layer not in self._missing:
            raise InvalidTransition(
                machine=f"inbound {self.name}", state=self.state.value, event=f"layer {layer} again"
            )
        del self._missing[layer]
        if self._missing:
            return [LayerReady(layer)]
        self.state = InboundState.DONE
        return [LayerReady(layer), Succeed(), Release()]

    def _fail(self, error: KVError) -> list[Effect]:
        self.state = InboundState.FENCING
        self.error = error
        return [Fail(error), Fence()]
