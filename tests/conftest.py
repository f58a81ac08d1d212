"""Settings of every test: properties are judged by what holds, never by how long an example took.

The suite runs in several workers, a file at a time. Files that start whole clusters, build wheels or run the model come
first: they are the longest. What goes over UCX runs after the rest, alone: a starved UCX takes a peer that is slow for
one that is gone.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

HEAVY = ("integration", "packaging", "model")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder whose path leaves room for Unix sockets, which those of pytest and its workers do not."""
    with tempfile.TemporaryDirectory(prefix="kvt", dir="/tmp") as folder:
        yield Path(folder)


@pytest.hookimpl(tryfirst=True)  # before the workers read the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is a unit of work; the longest come first."""
    heavy = set()
    for item in items:
        if "ucx" in item.nodeid:
            item.add_marker(pytest.mark.ucx)
        if any(item.get_closest_marker(name) for name in HEAVY):
            heavy.add(item.path)
        item.add_marker(pytest.mark.xdist_group(str(item.path.stem)))
    items.sort(key=lambda item: item.path not in heavy)
