"""A cluster file is either understood completely or refused with file, path and what was expected."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_services.config import ClusterConfig, Role
from kv_services.config_checks import check_config
from kv_services.config_errors import ConfigError
from kv_services.config_file import MAX_CONFIG_BYTES, dump_config, load_config, parse_config
from kv_services.sizes import parse_bytes

GATEWAY = """
[[node]]
id = "gw"
role = "gateway"
bus_port = 20000
events_port = 20001
http_port = 20002
"""
DECODE = """
[[node]]
id = "decode-1"
role = "decode"
bus_port = 20010
events_port = 20011
http_port = 20012
data_port = 20013
slots = 64
"""
ENGINE = """
[[kv_events.follow]]
name = "vllm-1"
events = "tcp://127.0.0.1:5557"
replay = "tcp://127.0.0.1:5558"
"""
TENANT = """
[[tenant]]
id = "acme"
api_keys = ["0123456789abcdef"]
"""

WRONG = [
    ("unknown table", "[modle]\n" + GATEWAY, "$.modle", "did you mean model?"),
    ("unknown field", GATEWAY + "http_prot = 1", "$.node[0].http_prot", "did you mean http_port?"),
    ("missing field", GATEWAY.replace('role = "gateway"', ""), "$.node[0].role", "missing; expected one of gateway,"),
    ("unknown role", GATEWAY.replace('"gateway"', '"router"'), "$.node[0].role", "gateway, prefill, decode, store, mo"),
    (
        "unknown dtype",
        '[model]\nkv_dtype = "bf18"' + GATEWAY,
        "$.model.kv_dtype",
        "bf16, fp16, fp32, got 'bf18'",
    ),
    ("port too large", GATEWAY.replace("20001", "65536"), "$.node[0].events_port", "from 1 to 65535, got 65536"),
    ("port as text", GATEWAY.replace("20001", '"20001"'), "$.node[0].events_port", "a whole number"),
    ("port as truth", GATEWAY.replace("20001", "true"), "$.node[0].events_port", "a whole number"),
    ("truth as number", "[transport]\nallow_ucx = 1" + GATEWAY, "$.transport.allow_ucx", "true or false, got 1"),
    ("out of range", "[transport]\nwindow_size = 0" + GATEWAY, "$.transport.window_size", "from 1 to 64, got 0"),
    ("not a number", "[health]\nkv_staleness_ms = nan" + GATEWAY, "$.health.kv_staleness_ms", "above 0"),
    ("infinite", "[limits]\nrequest_timeout_s = inf" + GATEWAY, "$.limits.request_timeout_s", "to 86400"),
    ("no nodes", "[cluster]", "$.node", "missing; expected a list of 1 or more"),
    ("nodes as number", "node = 3", "$.node", "a list of 1 or more, each a table, got 3"),
    ("bad id", GATEWAY.replace('"gw"', '"../gw"'), "$.node[0].id", "a name of a-z"),
    ("same id", GATEWAY + DECODE.replace("decode-1", "gw"), "$.node[1].id", "'gw' is also $.node[0].id"),
    ("same port", GATEWAY + DECODE.replace("20013", "20002"), "$.node[1].data_port", "is also $.node[0].http_port"),
    ("port twice in a node", GATEWAY.replace("20001", "20000"), "$.node[0].events_port", "$.node[0].bus_port"),
    ("every interface", GATEWAY + 'host = "0.0.0.0"', "$.node[0].host", "every interface"),
    ("every interface, v6", GATEWAY + 'host = "::"', "$.node[0].host", "every interface"),
    ("host name", GATEWAY + 'host = "localhost"', "$.node[0].host", "an IP address"),
    ("multicast", GATEWAY + 'host = "224.0.0.1"', "$.node[0].host", "multicast"),
    ("remote", GATEWAY + 'host = "10.0.0.1"', "$.node[0].host", "cluster.allow_remote = true"),
    (
        "open gateway on a network",
        "[cluster]\nallow_remote = true" + GATEWAY + 'host = "10.0.0.1"',
        "$.node[0].host",
        "a [[tenant]] with API keys",
    ),
    ("slots of a gateway", GATEWAY + "slots = 1", "$.node[0].slots", "a gateway holds no KV"),
    ("data port of a gateway", GATEWAY + "data_port = 20009", "$.node[0].data_port", "a gateway moves no KV"),
    ("no capacity", DECODE.replace("slots = 64", ""), "$.node[0]", "either slots or capacity"),
    ("two capacities", DECODE + 'capacity = "1 GiB"', "$.node[0]", "either slots or capacity"),
    ("decimal unit", DECODE.replace("slots = 64", 'capacity = "1 GB"'), "$.node[0].capacity", "KiB, MiB, GiB, TiB"),
    ("no data port", DECODE.replace("data_port = 20013", ""), "$.node[0].data_port", "transport.backend is 'auto'"),
    ("ucx unasked", '[transport]\nbackend = "ucx"' + DECODE, "$.transport.backend", "allow_ucx = true"),
    ("suspect at once", "[bus]\nsuspect_after_ms = 100" + GATEWAY, "$.bus.suspect_after_ms", "heartbeat_interval_ms"),
    ("dead at once", "[bus]\ndead_after_ms = 1000" + GATEWAY, "$.bus.dead_after_ms", "suspect_after_ms (1000)"),
    ("prompt over context", "[model]\nmax_context = 100" + GATEWAY, "$.limits.max_prompt_tokens", "max_context (100)"),
    ("tenant twice", TENANT + TENANT.replace("0123", "9876") + GATEWAY, "$.tenant[1].id", "is also $.tenant[0].id"),
    ("key twice", TENANT + TENANT.replace("acme", "b") + GATEWAY, "$.tenant[1].api_keys[0]", "$.tenant[0].api_keys[0]"),
    (
        "engine under a node's id",
        ENGINE.replace("vllm-1", "decode-1") + DECODE,
        "$.kv_events.follow[0].name",
        "'decode-1' is a node's id",
    ),
    ("engines of one name", ENGINE + ENGINE + GATEWAY, "$.kv_events.follow[1].name", "that of $.kv_events.follow[0]"),
    ("no TOML", "x = [", "$", "expected TOML"),
]


@pytest.mark.parametrize(("text", "path", "expected"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_field_is_named_with_file_path_and_what_was_expected(text: str, path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, file="/etc/kv/prod.toml")
    assert caught.value.fields["path"] == path
    assert str(caught.value).startswith(f"/etc/kv/prod.toml: {path}: ")
    assert expected in str(caught.value)


def test_a_small_file_gets_the_documented_defaults() -> None:
    config = parse_config(GATEWAY + DECODE)
    assert config.transport.backend == "auto"
    assert not config.transport.allow_ucx
    assert config.transport.window_size == 8
    assert config.model.block_size == 16
    assert config.model.dtype is DType.BF16
    assert config.health.kv_transfer_failure_rate == 0.01
    assert config.health.kv_staleness_ms == 10
    assert config.health.kv_replication_lag == 2
    assert config.health.kv_transfer_latency_p99_ms == 5
    assert config.health.kv_cache_hit_ratio == 0.6
    assert {node.host for node in config.nodes} == {"127.0.0.1"}


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "conf" / "cluster.toml"
    file.parent.mkdir()
    file.write_text('[model]\npath = "w/m.gguf"\n' + GATEWAY)
    monkeypatch.chdir(tmp_path)
    config = load_config("conf/cluster.toml")
    assert config.state_path == tmp_path / "conf" / "state"
    assert config.model.path == str(tmp_path / "conf" / "w" / "m.gguf")


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=why) as caught:
            load_config(file)
        assert caught.value.fields["file"] == str(file)


def test_a_file_that_is_no_utf8_or_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="UTF-8 text, byte 2"):
        load_config(file)
    with file.open("wb") as stream:
        stream.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(ConfigError, match="at most"):
        load_config(file)


def test_deep_nesting_is_refused_and_does_not_crash() -> None:
    with pytest.raises(ConfigError):
        parse_config("x = " + "[" * 100_000 + "]" * 100_000)


def test_secrets_are_neither_in_errors_nor_in_what_is_logged() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(TENANT.replace("0123456789abcdef", "topsecret") + GATEWAY)
    assert "topsecret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_config('[cluster]\noperator_keys = ["topsecret"]' + GATEWAY)
    assert "topsecret" not in str(caught.value)
    text = TENANT.replace("0123456789abcdef", "topsecrettopsecret") + 'salt = "alsosecret"' + GATEWAY
    config = parse_config('[cluster]\noperator_keys = ["verysecretverysecret"]\n' + text)
    assert "secret" not in repr(config)


def test_an_unknown_node_is_an_error_that_lists_those_there_are() -> None:
    config = parse_config(GATEWAY + DECODE)
    assert config.node("decode-1").role is Role.DECODE
    with pytest.raises(ConfigError, match="'decode-2'; there are: gw, decode-1"):
        config.node("decode-2")


def test_endpoints_bracket_ipv6() -> None:
    node = parse_config(GATEWAY + 'host = "::1"').nodes[0]
    assert node.bus_endpoint == "tcp://[::1]:20000"
    assert node.events_endpoint == "tcp://[::1]:20001"
    assert node.http_url == "http://[::1]:20002"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1 B", 1),
        ("4096B", 4096),
        ("1.5 KiB", 1536),
        ("2GiB", 2 << 30),
        ("0.1 TiB", (1 << 40) // 10),
        ("40 GiB", 40 << 30),
    ],
)
def test_sizes_are_binary_and_exact(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "1", "-1 B", "1 kb", "1 GB", "1e3 B", "1.2. B", "٣ B", "9" * 16 + " B"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_capacity_in_bytes_becomes_whole_slots() -> None:
    node = parse_config(DECODE.replace("slots = 64", 'capacity = "1 MiB"')).nodes[0]
    assert node.num_slots(block_nbytes=300_000) == 3
    with pytest.raises(ConfigError, match="expected at least"):
        node.num_slots(block_nbytes=2 << 20)
    assert parse_config(DECODE).nodes[0].num_slots(block_nbytes=1) == 64


def test_a_config_made_by_hand_is_checked_the_same_way() -> None:
    config = parse_config(GATEWAY)
    twice = ClusterConfig(nodes=[config.nodes[0], config.nodes[0]])
    with pytest.raises(ConfigError, match="unique id"):
        check_config(twice)


TEXT = st.text(max_size=30)


@given(salt=TEXT, model=st.text(min_size=1, max_size=30), rate=st.floats(0, 1), lag=st.integers(0, 2**60))
def test_every_config_survives_being_written_and_read(salt: str, model: str, rate: float, lag: int) -> None:
    base = parse_config(TENANT + GATEWAY + DECODE, file="/x/c.toml")
    config = msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, id=model),
        health=msgspec.structs.replace(base.health, kv_transfer_failure_rate=rate, kv_replication_lag=lag),
        tenants=[msgspec.structs.replace(base.tenants[0], salt=salt)],
    )
    assert parse_config(dump_config(config), file="/x/c.toml") == config
