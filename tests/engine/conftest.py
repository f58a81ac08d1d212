"""One tiny model for the whole run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_services.engine.llama import LlamaModel
from kv_services.engine.threads import blas_threads, set_blas_threads
from kv_services.engine.weights import Weights, open_weights
from tests.engine.helpers_engine import TinyLlama


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread() -> Iterator[None]:
    """Spinning threads of several test processes would make products ten times slower, and rounding would depend on
    how rows are dealt out to them."""
    before = blas_threads()
    set_blas_threads(1)
    yield
    set_blas_threads(before)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_weights(tiny_path: Path) -> Weights:
    return open_weights(tiny_path, cache_root=tiny_path.parent / "cache")


@pytest.fixture(scope="session")
def tiny(tiny_weights: Weights) -> LlamaModel:
    return LlamaModel(tiny_weights)
