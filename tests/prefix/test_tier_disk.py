"""The disk tier on a real folder: what survives, what is found damaged, what a full disk does."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from kv_prefix.tiers import disk, manifest
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.catalog import TierCatalog
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.errors import TierConfigError, TierFullError, TierInUseError
from tests.prefix.helpers_tiers import (
    BLOCK_SIZE,
    ROOM,
    SHAPE,
    SPARE,
    chain,
    content,
    open_store,
    prompt,
    read_back,
    with_bytes,
)

KILLS = int(os.environ.get("KV_TIER_KILLS", "20"))


def fill(folder: Path, seeds: range, num_blocks: int = 64) -> list[PlacedBlock]:
    """Store a few prompts and close, as a process that ends well."""
    store, held = open_store(folder, num_blocks)
    catalog = TierCatalog(store.num_places)
    catalog.restore(held)
    placed: list[PlacedBlock] = []
    for seed in seeds:
        plan = catalog.plan_store(chain(prompt(seed, 4)))
        store.write(with_bytes(plan.writes), plan.forget)
        catalog.stored(plan, ok=True)
        placed += plan.writes
    store.close()
    return placed


def test_a_thousand_random_blocks_come_back_equal(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(250), num_blocks=1000)
    store, held = open_store(tmp_path, 1000)
    assert held == placed
    shuffled = Random(1).sample(held, len(held))
    assert read_back(store, shuffled) == [content(item.block.sequence) for item in shuffled]
    store.close()


def test_a_long_run_is_read_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READ_CELLS", 2 * SHAPE.num_layers + 1)  # two blocks a call
    placed = fill(tmp_path, range(10))
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(placed[20].place * SHAPE.block_nbytes + 600)
        file.write(bytes(8))
    store, held = open_store(tmp_path, 64)
    expected = [content(item.block.sequence) if item != placed[20] else None for item in held]
    assert read_back(store, held) == expected
    store.close()


def test_what_is_not_in_the_page_cache_any_more_is_read_from_the_device(tmp_path: Path) -> None:
    fill(tmp_path, range(250), num_blocks=1000)
    with (tmp_path / "blocks").open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store, held = open_store(tmp_path, 1000)
    assert read_back(store, held) == [content(item.block.sequence) for item in held]
    store.close()


def test_a_folder_is_one_process_s(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, 8)
    with pytest.raises(TierInUseError):
        open_store(tmp_path, 8)
    store.close()
    open_store(tmp_path, 8)[0].close()


def test_a_place_that_no_folder_can_be_or_no_block_fits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierConfigError):
        DiskStore.open(tmp_path / "file", SHAPE, 1 << 20)
    with pytest.raises(TierConfigError, match="no block"):
        DiskStore.open(tmp_path / "folder", SHAPE, SHAPE.block_nbytes - 1)


def test_damage_anywhere_is_absence_and_nothing_else(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(3))
    random = Random(7)
    victims = sorted(random.sample(range(len(placed)), 4))
    with (tmp_path / "blocks").open("r+b") as file:
        for index in victims:
            at = placed[index].place * SHAPE.block_nbytes + random.randrange(SHAPE.block_nbytes)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))
    store, held = open_store(tmp_path, 64)
    got = read_back(store, held)
    expected = [None if i in victims else content(item.block.sequence) for i, item in enumerate(held)]
    assert got == expected
    store.close()


def test_a_short_or_missing_file_is_absence(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    os.truncate(tmp_path / "blocks", 5 * SHAPE.block_nbytes + 100)
    store, held = open_store(tmp_path, 64)
    got = read_back(store, held)
    assert [data is not None for data in got] == [item.place < 5 for item in held]
    store.close()
    (tmp_path / "blocks").unlink()
    store, held = open_store(tmp_path, 64)
    assert held and read_back(store, held) == [None] * len(held)
    store.close()


def test_every_beginning_of_a_manifest_opens_to_a_beginning_of_what_was_stored(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(2))
    whole, data = (tmp_path / "manifest").read_bytes(), (tmp_path / "blocks").read_bytes()
    sizes = [position for _, position in manifest.read_frames(whole)]
    for cut in range(0, len(whole), 17):
        (tmp_path / "manifest").write_bytes(whole[:cut])
        (tmp_path / "blocks").write_bytes(data)
        store, held = open_store(tmp_path, 64)
        num_records = sum(size <= cut for size in sizes[1:])
        assert held == placed[:num_records]
        assert read_back(store, held) == [content(item.block.sequence) for item in held]
        store.close()


def test_flipped_bits_in_a_manifest_never_give_wrong_bytes(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(2))
    whole = bytearray((tmp_path / "manifest").read_bytes())
    random = Random(3)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        (tmp_path / "manifest").write_bytes(damaged)
        store, held = open_store(tmp_path, 64)
        assert held == placed[: len(held)] and len(held) < len(placed)
        store.close()


def test_a_folder_of_another_shape_begins_anew_and_frees_its_bytes(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    other = DiskShape(SHAPE.layer_nbytes, SHAPE.num_layers, BLOCK_SIZE, "another dtype")
    store, held = DiskStore.open(tmp_path, other, SPARE + 64 * ROOM)
    assert held == [] and store.discarded > 0
    assert (tmp_path / "blocks").stat().st_size == 0
    store.close()


def test_the_limit_holds_over_restarts_also_when_it_is_lowered(tmp_path: Path) -> None:
    size = SPARE + 40 * ROOM
    fill(tmp_path, range(30), num_blocks=40)
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert total <= size
    store, held = open_store(tmp_path, 10)
    assert store.num_places == 10 and {item.place for item in held} <= set(range(10))
    assert read_back(store, held) == [content(item.block.sequence) for item in held]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= SPARE + 10 * ROOM
    store.close()


def test_a_long_life_keeps_its_manifest_within_the_limit(tmp_path: Path) -> None:
    fill(tmp_path, range(400), num_blocks=12)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= SPARE + 12 * ROOM
    store, held = open_store(tmp_path, 12)
    assert len(held) == 12 and store.discarded == 0
    store.close()


def test_what_was_forgotten_or_cleared_stays_away(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(3))
    store, _ = open_store(tmp_path, 64)
    store.forget([placed[0].place, placed[5].place])
    store.close()
    store, held = open_store(tmp_path, 64)
    assert held == [item for i, item in enumerate(placed) if i not in (0, 5)]
    store.clear()
    assert (tmp_path / "blocks").stat().st_size == 0
    store.close()
    store, held = open_store(tmp_path, 64)
    assert held == []
    store.close()


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process may grow beyond so many bytes, as on a full disk: writes fail in the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = 10 * SHAPE.block_nbytes + SHAPE.block_nbytes // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_is_said_and_costs_only_what_did_not_fit(tmp_path: Path, small_files: int) -> None:
    store, _ = open_store(tmp_path, 64)
    catalog = TierCatalog(store.num_places)
    outcomes = []
    for seed in range(6):
        plan = catalog.plan_store(chain(prompt(seed, 4)))
        try:
            store.write(with_bytes(plan.writes), plan.forget)
            catalog.stored(plan, ok=True)
            outcomes.append("stored")
        except TierFullError as error:
            assert "blocks" in str(error)
            catalog.stored(plan, ok=False, medium_full=True)
            outcomes.append("full")
    # Two prompts fit, the third finds the disk full, the others take the room of the oldest.
    assert outcomes == ["stored", "stored", "full", "stored", "stored", "stored"]
    assert catalog.stats().limit == 8
    store.close()
    store, held = open_store(tmp_path, 64)
    assert len(held) == 8
    assert read_back(store, held) == [content(item.block.sequence) for item in held]
    store.close()


def test_a_record_is_revoked_before_its_bytes_are_written_over(tmp_path: Path, small_files: int) -> None:
    store, _ = open_store(tmp_path, 64)
    one, two = chain(prompt(1, 2))
    store.write(with_bytes([PlacedBlock(0, one)]))
    with pytest.raises(TierFullError):
        store.write(with_bytes([PlacedBlock(60, two)]), forget=[0])
    store.close()
    store, held = open_store(tmp_path, 64)
    assert held == []
    store.close()


def test_a_manifest_that_cannot_grow_loses_only_the_newest(tmp_path: Path) -> None:
    placed = fill(tmp_path, range(12))
    store, _ = open_store(tmp_path, 64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = (tmp_path / "manifest").stat().st_size
    blocks = chain(prompt(9, 1))
    try:
        # Half of the next record fits: a frame cut in two would hide every later one.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 60, before[1]))
        with pytest.raises(TierFullError, match="manifest"):
            store.write(with_bytes([PlacedBlock(2, blocks[0])]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    store.write(with_bytes([PlacedBlock(60, blocks[0])]))
    store.close()
    store, held = open_store(tmp_path, 64)
    assert [item.place for item in held] == [item.place for item in placed] + [60]
    store.close()


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process grows, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.parametrize("cut_off", [0, 5, 400])
def test_a_full_disk_opens_with_what_it_holds_and_takes_blocks_when_there_is_room(tmp_path: Path, cut_off: int) -> None:
    fill(tmp_path, range(4))
    path = tmp_path / "manifest"
    raw = bytearray(path.read_bytes())
    if cut_off:
        raw[-cut_off] ^= 1  # the records from there on are not sound
    path.write_bytes(raw)
    newest, late = chain(prompt(9, 2))
    with no_room():
        store, held = open_store(tmp_path, 64)
        assert 12 <= len(held) <= 16
        assert read_back(store, held) == [content(item.block.sequence) for item in held]
        with pytest.raises(TierFullError):
            store.write(with_bytes([PlacedBlock(60, newest)]))
    # There is room again: what is written follows the last sound record, and nothing of before follows it.
    store.write(with_bytes([PlacedBlock(61, late)]))
    store.close()
    store, again = open_store(tmp_path, 64)
    assert again == [*held, PlacedBlock(61, late)]
    assert read_back(store, again) == [content(item.block.sequence) for item in again]
    store.close()


def test_blocks_that_were_written_are_stored_though_the_manifest_finds_no_room_to_be_made_anew(tmp_path: Path) -> None:
    fill(tmp_path, range(24), num_blocks=128)
    store, held = open_store(tmp_path, 128)
    store.forget([item.place for item in held])  # few are live, and most of the manifest is of those that were
    (tmp_path / "manifest.new").symlink_to("/dev/full")
    placed = [PlacedBlock(place, block) for place, block in enumerate(chain(prompt(90, 80)))]
    for item in placed:
        store.write(with_bytes([item]))
    assert not (tmp_path / "manifest.new").is_symlink()  # it was tried
    store.close()
    store, again = open_store(tmp_path, 128)
    assert again == placed
    assert read_back(store, again) == [content(item.block.sequence) for item in again]
    store.close()


def test_a_full_disk_can_be_cleared_and_a_folder_of_another_shape_begins_anew_on_it(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    other = dataclasses.replace(SHAPE, name="another")
    size = SPARE + 64 * ROOM
    with no_room():
        store, held = DiskStore.open(tmp_path, other, size)
        assert held == []
        store.close()
    fill(tmp_path, range(4))
    with no_room():
        store, held = open_store(tmp_path, 64)
        assert len(held) == 16
        store.clear()
        store.close()
        store, held = open_store(tmp_path, 64)
        assert held == []
    (late,) = chain(prompt(9, 1))
    store.write(with_bytes([PlacedBlock(3, late)]))
    store.close()
    store, again = open_store(tmp_path, 64)
    assert again == [PlacedBlock(3, late)]
    store.close()


def test_a_process_killed_at_any_instant_loses_nothing_acknowledged_and_serves_nothing_wrong(tmp_path: Path) -> None:
    """`make tiers KILLS=100` is the long form."""
    random = Random(KILLS)
    acknowledged: set[bytes] = set()
    folder = tmp_path / "tier"
    num_stored = 0
    for round_ in range(KILLS):
        command = [sys.executable, "-m", "tests.prefix.tier_victim", str(folder), str(round_), "40"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n", round_
            lines = [process.stdout.readline() for _ in range(random.randint(0, 120))]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL, round_
        for line in lines:
            if not line.endswith(b"\n"):
                continue
            name = bytes.fromhex(line[2:].decode())
            if line[:1] == b"+":
                acknowledged.add(name)
                num_stored += 1
            else:
                acknowledged.discard(name)
        store, held = open_store(folder, 40)
        found = {
            item.block.sequence: data
            for item, data in zip(held, read_back(store, held), strict=True)
            if data is not None
        }
        assert acknowledged <= set(found), round_
        assert all(data == content(name) for name, data in found.items()), round_
        # What was found is what the next process begins with.
        acknowledged = set(found)
        store.close()
    assert num_stored > 10 * KILLS
