"""The error tree: codes are unique, sentences never fail, and what crosses the wire comes back."""

import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_core
from kv_core import limits
from kv_core.errors import (
    KVError,
    LocalProtocolError,
    MissingExtraError,
    RemoteProtocolError,
    RetryableError,
    UnknownRemoteError,
    error_from_wire,
)


class PoolFull(RetryableError):
    code = 990_010
    template = "need {need} slots, {free} are free"


def subclasses(cls: type[KVError]) -> set[type[KVError]]:
    below = set(cls.__subclasses__())
    return below.union(*(subclasses(sub) for sub in below)) if below else below


def test_an_error_says_its_sentence_and_keeps_its_fields() -> None:
    error = PoolFull(need=3, free=1)
    assert str(error) == "need 3 slots, 1 are free"
    assert error.fields == {"need": 3, "free": 1}


def test_what_may_be_retried_is_said_by_the_class() -> None:
    assert isinstance(PoolFull(need=1, free=0), RetryableError)
    assert not isinstance(LocalProtocolError(detail="x"), RetryableError)
    assert not isinstance(RemoteProtocolError(detail="x"), LocalProtocolError)


def test_a_code_names_one_class() -> None:
    with pytest.raises(TypeError, match=r"990010 belongs to .*PoolFull"):

        class Other(KVError):
            code = 990_010

    with pytest.raises(TypeError, match="990010 belongs to"):
        type("PoolFull", (KVError,), {"code": 990_010, "__module__": "elsewhere", "__qualname__": "PoolFull"})


def test_every_code_of_this_package_lies_in_its_range_and_has_one_class() -> None:
    for module in pkgutil.walk_packages(kv_core.__path__, "kv_core."):
        importlib.import_module(module.name)
    ours = [cls for cls in subclasses(KVError) if cls.__module__.startswith("kv_core.") and "code" in cls.__dict__]
    codes = [cls.code for cls in ours]
    assert len(ours) > 20
    assert len(set(codes)) == len(codes)
    assert all(1000 < code < 2000 for code in codes)


def test_a_sentence_without_its_fields_says_what_there_is() -> None:
    assert str(PoolFull(free=1)) == "PoolFull: {'free': 1}"
    assert str(MissingExtraError()) == "MissingExtraError: {}"


class Hexed(KVError):
    code = 990_011
    template = "at {at:#x}, {name.first}"


@pytest.mark.parametrize("fields", [{"at": "text"}, {"at": None}, {"at": 1, "name": 1}, {"at": [1]}])
def test_fields_of_another_type_do_not_break_the_sentence(fields: dict[str, str]) -> None:
    assert str(Hexed(**fields)).startswith("Hexed: ")


fields = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["self", "need", "detail", "code"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(limits.MIN_INT64, limits.MAX_UINT64) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    ),
    max_size=4,
)


@given(st.sampled_from([1001, 1002, 990_010, 990_011, 1, -5, 1 << 70]), fields)
def test_rebuilding_never_raises(code: int, fields: dict[str, str]) -> None:
    error = error_from_wire(code, fields)
    assert isinstance(error, KVError)
    if error.code == code:
        assert error.fields == fields
    else:
        assert isinstance(error, UnknownRemoteError)
        assert error.fields["remote_code"] == code


class Stubborn(KVError):
    code = 990_012

    def __init__(self, position: int) -> None:
        super().__init__(position=position)


def test_a_class_that_cannot_be_rebuilt_arrives_as_unknown() -> None:
    assert isinstance(error_from_wire(990_012, {"what": 5}), UnknownRemoteError)


def test_what_goes_on_the_wire_is_bounded() -> None:
    many = {f"field{i}": "x" * 5000 for i in range(100)}
    many["field1"] = [["y" * 500] * 100] * 100  # type: ignore[assignment]
    _, sent = PoolFull(**many).to_wire()
    assert len(sent) == limits.MAX_ERROR_FIELDS
    assert len(repr(sent)) < 4 * limits.MAX_ERROR_NBYTES


def test_what_the_wire_cannot_hold_becomes_text() -> None:
    values = {"nan": float("nan"), "huge": 1 << 70, "set": {1}, "lone": "\ud800", "deep": [[[1]]], "fine": [1, [2]]}
    _, sent = PoolFull(**values).to_wire()  # type: ignore[arg-type]
    assert sent == {
        "nan": "nan", "huge": str(1 << 70), "set": "{1}", "lone": "?", "deep": [["[1]"]], "fine": [1, [2]],
    }  # fmt: skip


def test_a_missing_extra_says_how_to_get_it() -> None:
    error = MissingExtraError(feature="reading GGUF", module="gguf", package="kv-core", extra="gguf")
    assert "pip install 'kv-core[gguf]'" in str(error)
