"""`kv_retention` of a request: what may be asked, by whom, and what becomes of it."""

import json
from typing import Any

import pytest

from kv_core.ids import RequestId, TenantId
from kv_services.engine.byte_tokenizer import ByteTokenizer
from kv_services.gateway.admission import RequestLimits, ServedModel, admit
from kv_services.gateway.errors import InvalidRequestError, UnsupportedParameterError
from kv_services.gateway.openai_schema import CHAT, COMPLETIONS
from kv_services.gateway.tenancy import OPEN_RETAIN_TTL_MAX_S, ApiKeys, Caller

MODEL = ServedModel("m", ByteTokenizer(), 100, "1")


def asked(retention: Any, caller: Caller) -> tuple[int, int] | None:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 1, "kv_retention": retention}
    request = COMPLETIONS.parse(json.dumps(body).encode())
    admitted = admit(
        request,
        [1, 2],
        MODEL,
        caller=caller,
        limits=RequestLimits(50, 50, 1.0),
        request_id=RequestId("r"),
        received_ns=0,
        drawn_seed=0,
    )
    return admitted.kv.retention


def test_what_is_asked_reaches_the_nodes_as_priority_and_nanoseconds() -> None:
    open_caller = ApiKeys().caller(None)
    assert asked({"ttl_s": 60, "priority": 7}, open_caller) == (7, 60_000_000_000)
    assert asked({"ttl_s": 60}, open_caller) == (50, 60_000_000_000)
    assert asked(None, open_caller) is None


def test_a_tenant_asks_within_its_limits() -> None:
    caller = Caller(TenantId("a"), retain_ttl_max_s=100)
    assert asked({"ttl_s": 100}, caller) == (50, 100_000_000_000)
    with pytest.raises(InvalidRequestError, match="at most 100 for you") as raised:
        asked({"ttl_s": 101}, caller)
    assert raised.value.fields["param"] == "kv_retention.ttl_s"
    with pytest.raises(UnsupportedParameterError, match="retain_quota"):
        asked({"ttl_s": 1}, Caller(TenantId("b")))
    with pytest.raises(InvalidRequestError):
        asked({"ttl_s": OPEN_RETAIN_TTL_MAX_S + 1}, ApiKeys().caller(None))


@pytest.mark.parametrize(
    "retention",
    [{}, {"ttl_s": 0}, {"ttl_s": 1.5}, {"ttl_s": "1"}, {"ttl_s": 1, "priority": 101}, {"ttl_s": 1, "more": 1}, 5, []],
)
def test_what_is_no_retention_is_refused_by_name(retention: Any) -> None:
    for parser, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        with pytest.raises(InvalidRequestError) as raised:
            parser.parse(json.dumps({"model": "m", "kv_retention": retention, **prompt}).encode())
        assert str(raised.value.fields["param"]).startswith("kv_retention")
