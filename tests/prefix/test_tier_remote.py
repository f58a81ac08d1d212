"""The remote tier against a real S3 server and a folder: the same promises as on disk."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_bus.ports import pick_ports
from kv_core.errors import MissingExtraError
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.catalog import TierCatalog
from kv_prefix.tiers.disk import DiskShape
from kv_prefix.tiers.errors import TierConfigError, TierIOError
from kv_prefix.tiers.remote import RemoteStore, Sibling
from tests.prefix.conftest import KEY, SECRET
from tests.prefix.helpers_tiers import BLOCK_SIZE, SHAPE, chain, content, cut, prompt, with_bytes

pytest.importorskip("obstore")

Open = Callable[..., tuple[RemoteStore, list[PlacedBlock]]]
ROOM = SHAPE.block_nbytes + SHAPE.record_nbytes


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Open, Path]:
    """How to open the node's prefix, and where its objects lie as files."""
    if request.param == "folder":
        url, endpoint, files = f"file://{tmp_path}/shared", "", tmp_path / "shared" / "node-1"
    else:
        server, bucket = request.getfixturevalue("s3_server")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        url, endpoint, files = f"s3://bucket/{tmp_path.name}", server, bucket / tmp_path.name / "node-1"

    def opened(
        num_blocks: int = 64, shape: DiskShape = SHAPE, folder: str = "node-1", abandoned_after_s: float = 600
    ) -> tuple[RemoteStore, list[PlacedBlock]]:
        return RemoteStore.open(url, folder, shape, num_blocks * ROOM, endpoint, abandoned_after_s)

    return opened, files


def read_back(store: RemoteStore, placed: list[PlacedBlock]) -> list[bytes | None]:
    buffers = [bytearray(SHAPE.block_nbytes) for _ in placed]
    sound = store.read([(item, cut(buffer)) for item, buffer in zip(placed, buffers, strict=True)])
    return [bytes(buffer) if good else None for buffer, good in zip(buffers, sound, strict=True)]


def by_place(placed: list[PlacedBlock]) -> list[PlacedBlock]:
    return sorted(placed, key=lambda item: item.place)


def fill(opened: Open, seeds: range, num_blocks: int = 64) -> list[PlacedBlock]:
    store, held = opened(num_blocks)
    catalog = TierCatalog(store.num_places)
    catalog.restore(held)
    for seed in seeds:
        plan = catalog.plan_store(chain(prompt(seed, 4)))
        store.write(with_bytes(plan.writes), plan.forget)
        catalog.stored(plan, ok=True)
    placed = catalog.begin_load(catalog.blocks())
    store.close()
    return by_place(list(placed))


def test_blocks_outlive_a_restart_and_come_back_equal(place: tuple[Open, Path]) -> None:
    placed = fill(place[0], range(3))
    store, held = place[0]()
    assert by_place(held) == placed
    assert read_back(store, held) == [content(item.block.sequence) for item in held]
    store.close()


def test_damaged_short_and_missing_objects_are_absent(place: tuple[Open, Path]) -> None:
    placed = fill(place[0], range(2))
    files = place[1]
    names = [files / f"{item.place:08x}.kv" for item in placed[:3]]
    data = bytearray(names[0].read_bytes())
    data[100] ^= 1
    names[0].write_bytes(data)
    names[1].write_bytes(data[:-1])
    names[2].unlink()
    (files / f"{placed[3].place:08x}.meta").write_bytes(b"not a record")
    store, held = place[0]()
    assert by_place(held) == [item for item in placed if item != placed[3]]
    got = dict(zip((item.place for item in held), read_back(store, held), strict=True))
    assert [got[item.place] is None for item in placed if item != placed[3]] == [True] * 3 + [False] * 4
    store.close()


def test_a_full_tier_replaces_and_keeps_to_its_size(place: tuple[Open, Path]) -> None:
    placed = fill(place[0], range(4), num_blocks=6)
    assert len(placed) == 6
    store, held = place[0](6)
    assert by_place(held) == placed
    assert read_back(store, held) == [content(item.block.sequence) for item in held]
    store.close()
    assert sum(file.stat().st_size for file in place[1].iterdir() if file.name not in ("header", "alive")) <= 6 * ROOM


def test_bytes_without_a_record_are_swept_and_another_shape_begins_anew(place: tuple[Open, Path]) -> None:
    placed = fill(place[0], range(1))
    # As a process that was killed between the two leaves it; the server keeps a list of its own, so ask it.
    store, _ = place[0]()
    store._delete(f"node-1/{placed[0].place:08x}.meta")
    store.close()
    store, held = place[0]()
    assert by_place(held) == placed[1:]
    assert not (place[1] / f"{placed[0].place:08x}.kv").exists()
    store.close()
    other = DiskShape(SHAPE.layer_nbytes, SHAPE.num_layers, BLOCK_SIZE, "another dtype")
    store, held = place[0](64, other)
    assert held == [] and {file.name for file in place[1].iterdir()} == {"header", "alive"}
    store.close()


def test_what_a_node_left_is_read_under_places_of_another_and_stays_while_it_may_come_back(
    place: tuple[Open, Path],
) -> None:
    placed = fill(place[0], range(2))
    other, held = place[0](folder="node-2")
    assert held == [] and other.siblings() == [Sibling("node-1", abandoned=False)]
    records = by_place(other.records_of("node-1"))
    assert records == placed
    ours = [PlacedBlock(40 + i, item.block) for i, item in enumerate(records)]
    other.bind("node-1", [(mine.place, item.place) for mine, item in zip(ours, records, strict=True)])
    assert other.used_bytes() == len(placed) * SHAPE.block_nbytes
    assert read_back(other, ours) == [content(item.block.sequence) for item in placed]
    # A place of its own takes over from one that was bound; what was behind it stays, and so does what is discarded.
    other.write(with_bytes([PlacedBlock(40, chain(prompt(9, 1))[0])]))
    other.forget([41])
    other.discard("node-1", [item.place for item in placed])
    assert read_back(other, ours[:3]) == [None, None, content(placed[2].block.sequence)]
    other.release("node-1")
    assert read_back(other, ours[2:]) == [None] * (len(ours) - 2)
    other.close()
    store, held = place[0]()
    assert by_place(held) == placed and None not in read_back(store, held)
    store.close()


def test_what_a_node_left_is_deleted_only_after_it_was_silent_for_long(place: tuple[Open, Path]) -> None:
    placed = fill(place[0], range(2))
    other, _ = place[0](folder="node-2", abandoned_after_s=0.5)
    while not other.siblings()[0].abandoned:  # the store's clock goes on
        time.sleep(0.2)
        other.say_alive()
    other.bind("node-1", [(40, placed[0].place)])
    other.forget([40])
    assert by_place(other.records_of("node-1")) == placed[1:]
    other.discard("node-1", [item.place for item in placed[1:]])
    assert other.siblings() == [] and other.records_of("node-1") == []
    other.close()


def test_after_a_night_without_anybody_the_first_to_come_gives_nobody_up(tmp_path: Path) -> None:
    def opened(folder: str) -> RemoteStore:
        return RemoteStore.open(f"file://{tmp_path}", folder, SHAPE, 8 * ROOM)[0]

    opened("node-1").close()
    store = opened("node-2")
    night = time.time() - 36_000
    os.utime(tmp_path / "node-1" / "alive", (night, night))
    assert store.siblings() == [Sibling("node-1", abandoned=False)]
    store.close()


def test_blocks_of_another_shape_are_nobody_s_to_take(place: tuple[Open, Path]) -> None:
    fill(place[0], range(1))
    another = DiskShape(SHAPE.layer_nbytes, SHAPE.num_layers, BLOCK_SIZE, "another dtype")
    other, _ = place[0](shape=another, folder="node-2")
    assert other.siblings() == []
    other.close()


def test_a_store_that_does_not_answer_is_an_error_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (port,) = pick_ports(1)
    with pytest.raises(TierIOError, match="s3://bucket"):
        RemoteStore.open("s3://bucket/x", "node-1", SHAPE, 64 * ROOM, f"http://127.0.0.1:{port}")


def test_wrong_keys_and_wrong_places_are_refused(
    s3_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret-key-of-length")
    with pytest.raises(TierIOError) as caught:
        RemoteStore.open("s3://bucket/x", "node-1", SHAPE, 64 * ROOM, s3_server[0])
    assert "a-wrong-secret" not in str(caught.value)
    with pytest.raises(TierConfigError):
        RemoteStore.open("ftp://somewhere/x", "node-1", SHAPE, 64 * ROOM)
    with pytest.raises(TierConfigError, match="no block"):
        RemoteStore.open(f"file://{tmp_path}", "node-1", SHAPE, 100)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"kv-prefix\[remote\]"):
        RemoteStore.open(f"file://{tmp_path}", "node-1", SHAPE, 64 * ROOM)
