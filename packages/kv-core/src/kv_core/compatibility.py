"""What two processes must agree on before one joins the other's cluster.

Compared: wire version, hash scheme, and for each model that both serve, weights revision and block size. A difference
is refused with both values, because what it would cause otherwise is silence: no hit, ever, or bytes of other weights.
A model that only one of them serves is nobody's business. Revisions of one wire version are declared compatible: they
are told, so that a cluster in the middle of an upgrade can be seen, and never refused.
"""

from typing import Annotated

import msgspec

from kv_core import limits
from kv_core.errors import KVError
from kv_core.namespace import HASH_SCHEME
from kv_core.wire import WIRE_VERSION

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]


class IncompatiblePeerError(KVError):
    """A peer that differs in what must agree."""

    code = 1080
    template = "peer {peer} is incompatible in {what}: it has {theirs!r}, this cluster has {ours!r}"


class ServedModel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What must agree about one model."""

    model_id: _Name
    weights_revision: _Name
    block_size: Annotated[int, msgspec.Meta(ge=limits.MIN_BLOCK_SIZE, le=limits.MAX_BLOCK_SIZE)]


class Compatibility(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a process says about itself when it joins; may be a field of a message."""

    models: Annotated[tuple[ServedModel, ...], msgspec.Meta(max_length=1024)]
    hash_scheme: _Name = HASH_SCHEME
    wire_version: int = WIRE_VERSION
    wire_revision: int = 0  # what a peer means that is older than revisions

    @property
    def wire(self) -> str:
        """Wire version and revision, for people."""
        return f"{self.wire_version}.{self.wire_revision}"


def check_compatible(peer: str, ours: Compatibility, theirs: Compatibility) -> None:
    """Return if the two may share KV.

    Raises:
        IncompatiblePeerError: the first difference, with both values.
    """
    _compare(peer, "wire version", ours.wire_version, theirs.wire_version)
    _compare(peer, "hash scheme", ours.hash_scheme, theirs.hash_scheme)
    ours_by_id = {model.model_id: model for model in ours.models}
    for model in theirs.models:
        own = ours_by_id.get(model.model_id)
        if own is not None:
            _compare(peer, f"weights revision of {model.model_id}", own.weights_revision, model.weights_revision)
            _compare(peer, f"block size of {model.model_id}", own.block_size, model.block_size)


def _compare(peer: str, what: str, ours: str | int, theirs: str | int) -> None:
    if ours != theirs:
        raise IncompatiblePeerError(peer=peer, what=what, ours=ours, theirs=theirs)
