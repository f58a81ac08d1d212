"""Shared by the tests of kv-core."""

from collections.abc import Iterable

from kv_core.hashing import Extra
from kv_core.namespace import Namespace
from tests.core.plain_hashing import Content, Field


def fields_of(namespace: Namespace) -> tuple[Field, ...]:
    """A namespace as the plain twin takes it."""
    return (
        namespace.model_id,
        namespace.weights_revision,
        namespace.lora_name,
        namespace.lora_revision,
        namespace.salt,
        namespace.dtype.value,
        str(namespace.fidelity),
        namespace.block_size,
    )


def contents_of(extras: Iterable[Extra]) -> list[Content]:
    """Extras as the plain twin takes them."""
    return [(extra.start, extra.length, extra.digest) for extra in extras]
