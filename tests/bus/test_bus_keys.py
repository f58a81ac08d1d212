"""Keys: where they lie, who may read them, whose they are."""

import logging
import os
from pathlib import Path

import pytest

from kv_bus.errors import AllowListError, KeyFileError
from kv_bus.keys import (
    AllowList,
    AllowListFile,
    FixedAllowList,
    create_key_pair,
    fingerprint,
    generate_key_pair,
    key_path,
    load_key_pair,
    read_allow_list,
    write_allow_list,
)
from kv_core.ids import NodeId

NODE = NodeId("prefill-1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys"


def test_a_key_pair_is_kept_private_and_read_back(folder: Path) -> None:
    old = os.umask(0)
    try:
        made = create_key_pair(folder, NODE)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert key_path(folder, NODE).stat().st_mode & 0o777 == 0o600
    assert load_key_pair(folder, NODE) == made
    assert len(made.public_key) == len(made.secret_key) == 40
    assert generate_key_pair(NODE).public_key != made.public_key


def test_a_key_is_never_overwritten(folder: Path) -> None:
    made = create_key_pair(folder, NODE)
    with pytest.raises(KeyFileError, match="exists already"):
        create_key_pair(folder, NODE)
    assert load_key_pair(folder, NODE) == made


def test_a_secret_shows_in_no_repr_and_no_error(folder: Path) -> None:
    made = create_key_pair(folder, NODE)
    assert made.secret_key not in f"{made!r} {made}"
    path = key_path(folder, NODE)
    texts = [
        path.read_text().replace("secret_key", "secret"),
        path.read_text().replace('secret_key = "', 'secret_key = "\\q'),
        path.read_text()[:-3],
    ]
    for text in texts:
        path.write_text(text)
        with pytest.raises(KeyFileError) as caught:
            load_key_pair(folder, NODE)
        error: BaseException | None = caught.value
        while error is not None:
            assert made.secret_key not in f"{error!r} {error}"
            error = error.__cause__


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_key_file_open_to_others_is_refused(folder: Path, mode: int) -> None:
    create_key_pair(folder, NODE)
    key_path(folder, NODE).chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode {mode:04o}, at most 0600"):
        load_key_pair(folder, NODE)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_key_folder_open_to_others_is_refused(folder: Path, mode: int) -> None:
    create_key_pair(folder, NODE)
    folder.chmod(mode)
    for use in (load_key_pair, create_key_pair):
        with pytest.raises(KeyFileError, match=f"has mode {mode:04o}, at most 0700"):
            use(folder, NODE)


def test_a_key_file_that_does_not_fit_is_refused_with_the_reason(folder: Path) -> None:
    made, other = create_key_pair(folder, NODE), generate_key_pair(NodeId("other"))
    path = key_path(folder, NODE)
    good = path.read_text()
    cases = {
        "the public key does not belong": good.replace(made.public_key, other.public_key),
        "not 40 characters of Z85": good.replace(made.public_key, made.public_key[:-1]),
        "is the key of 'x'": good.replace(NODE, "x"),
        "nothing else": good + "more = 1\n",
        "is not TOML": "secret_key",
        "is not UTF-8": "\xff",
        "larger than": "#" * (2 << 20),
    }
    for reason, text in cases.items():
        path.write_text(text, encoding="latin-1")
        with pytest.raises(KeyFileError, match=reason):
            load_key_pair(folder, NODE)
    path.unlink()
    with pytest.raises(KeyFileError, match="No such file"):
        load_key_pair(folder, NODE)
    path.mkdir()
    with pytest.raises(KeyFileError):
        load_key_pair(folder, NODE)
    with pytest.raises(KeyFileError, match="No such file"):
        load_key_pair(folder / "none", NODE)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "with blank", "-x", "n" * 300, "a\nb", "ä"])
def test_a_name_that_is_no_file_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match="not allowed"):
        create_key_pair(folder, NodeId(name))
    with pytest.raises(AllowListError, match="not allowed"):
        AllowList("demo", {NodeId(name): generate_key_pair(NODE).public_key})
    with pytest.raises(AllowListError, match="cluster name"):
        AllowList(name, {})


def a_list(*names: str) -> AllowList:
    return AllowList("demo", {NodeId(name): generate_key_pair(NODE).public_key for name in names})


def test_an_allow_list_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path, allow_list = tmp_path / "cluster.keys", a_list("a", "b-1", "c.x_y")
    write_allow_list(path, allow_list)
    assert read_allow_list(path) == allow_list
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.keys"]
    assert all(allow_list.owners[key] == name for name, key in allow_list.keys.items())
    with pytest.raises(AllowListError, match="No such file"):
        write_allow_list(tmp_path / "none" / "x", allow_list)


def test_one_key_for_two_nodes_is_refused() -> None:
    key = generate_key_pair(NODE).public_key
    with pytest.raises(AllowListError, match="a and b have the same key"):
        AllowList("demo", {NodeId("a"): key, NodeId("b"): key})


def test_a_list_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "cluster.keys"
    for reason, text in {
        "must hold cluster": 'cluster = "demo"\n',
        "nothing else": 'cluster = "demo"\nmore = 1\n[nodes]\n',
        "a name and a public key": 'cluster = "demo"\n[nodes]\na = 1\n',
        "the key of a is not 40": 'cluster = "demo"\n[nodes]\na = "short"\n',
        "is not TOML": "cluster =",
    }.items():
        path.write_text(text)
        with pytest.raises(AllowListError, match=reason):
            read_allow_list(path)
    with pytest.raises(AllowListError):
        AllowListFile(tmp_path / "missing")
    write_allow_list(path, a_list("a"))
    path.chmod(0o666)
    with pytest.raises(AllowListError, match="at most 0644"):
        read_allow_list(path)


def test_a_changed_list_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, first, second = tmp_path / "cluster.keys", a_list("a"), a_list("a", "b")
    write_allow_list(path, first)
    source = AllowListFile(path)
    assert source.current == first and not source.refresh()
    write_allow_list(path, second)
    assert source.refresh() and source.current == second and not source.refresh()
    with caplog.at_level(logging.ERROR):
        path.write_text("[nodes")
        assert not source.refresh() and not source.refresh()
        path.unlink()
        assert not source.refresh()
    assert source.current == second
    assert (source.failures, len(caplog.records)) == (2, 2)
    write_allow_list(path, first)
    assert source.refresh() and source.current == first


def test_a_fixed_list_stays_and_a_fingerprint_is_short() -> None:
    fixed = FixedAllowList(a_list("a"))
    assert not fixed.refresh()
    assert len(fingerprint(generate_key_pair(NODE).public_key)) == 8
