"""What HTTP makes of the product's errors."""

import importlib
import pkgutil

import pytest

from kv_core.errors import KVError, RetryableError
from kv_services.engine.errors import ChatTemplateError, TextTooLongError
from kv_services.gateway.admission import prompt_tokens
from kv_services.gateway.errors import (
    BodyTooLargeError,
    ContextLengthError,
    GatewayError,
    HttpFault,
    InvalidRequestError,
    NoNodesError,
    OverloadedError,
    PromptTooLongError,
    StreamProtocolError,
    fault_of,
    param_of,
    register_fault,
)
from kv_services.gateway.openai_answers import encode, error_answer
from kv_services.gateway.openai_schema import CHAT, COMPLETIONS
from tests.gateway.helpers_gateway import ByteTokenizer


def with_subclasses(cls: type[KVError]) -> set[type[KVError]]:
    return {cls}.union(*(with_subclasses(sub) for sub in cls.__subclasses__()))


PACKAGES = ("kv_core", "kv_bus", "kv_consistency", "kv_prefix", "kv_transport", "kv_client", "kv_services")


def test_every_error_of_the_product_has_a_status_and_a_form() -> None:
    # All of it can be imported together: no two classes have one code, and no module needs an extra to be read.
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    # The tests' own classes are left out: which of them exist depends on what was imported before.
    product = [cls for cls in with_subclasses(KVError) if cls.__module__.startswith("kv_")]
    assert OverloadedError in product
    for cls in product:
        error = cls(detail="d", param="p")
        fault = fault_of(error)
        assert 400 <= fault.status < 600, cls
        assert (fault.status < 500) == (fault.type != "server_error"), cls
        assert (fault.status in (429, 503)) == (fault.retry_after_s is not None), cls
        if issubclass(cls, RetryableError):
            assert fault.status in (429, 503), cls
        assert b'{"error":{"message":' in encode(error_answer(error))


def test_a_class_decides_for_its_subclasses_and_the_nearest_wins() -> None:
    assert fault_of(PromptTooLongError(prompt_tokens=9, limit=8)) == fault_of(
        ContextLengthError(prompt_tokens=9, max_tokens=1, limit=8)
    )
    assert fault_of(InvalidRequestError(detail="x", param="")).code == "invalid_value"
    assert fault_of(NoNodesError(role="decode", model="m")).code == "no_nodes"
    assert fault_of(RetryableError(detail="x")) == HttpFault(503, "server_error", "try_again", 1)
    assert fault_of(GatewayError(detail="x")).status == 500
    assert fault_of(StreamProtocolError(detail="x")).status == 500


@pytest.mark.parametrize(("wait_s", "shown"), [(0.2, 1), (1, 1), (1.01, 2), (30, 30), (-5, 1), ("soon", 1), (None, 1)])
def test_the_time_to_come_again_is_whole_seconds_and_at_least_one(wait_s: float | str | None, shown: int) -> None:
    assert fault_of(OverloadedError(what="x", limit=1, retry_after_s=wait_s)).retry_after_s == shown


def test_an_error_of_another_package_can_be_given_a_form() -> None:
    class ElsewhereError(KVError):
        pass

    assert fault_of(ElsewhereError(detail="x")).status == 500
    register_fault(ElsewhereError, HttpFault(409, "invalid_request_error", "elsewhere"))
    assert fault_of(ElsewhereError(detail="x")).code == "elsewhere"


def test_a_parameter_is_named_only_when_there_is_one() -> None:
    assert param_of(InvalidRequestError(detail="x", param="n")) == "n"
    assert param_of(InvalidRequestError(detail="x", param="")) is None
    assert param_of(GatewayError(detail="x")) is None


def test_the_tokenisers_refusals_are_the_clients_errors() -> None:
    class Refusing(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise TextTooLongError(what="text", size=9, limit=8)

        def encode_chat(self, messages: object) -> list[int]:
            raise ChatTemplateError(detail="roles must alternate")

    with pytest.raises(BodyTooLargeError, match="limit of 8 bytes"):
        prompt_tokens(COMPLETIONS.parse(b'{"model":"m","prompt":"x"}'), Refusing())
    chat = CHAT.parse(b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    with pytest.raises(InvalidRequestError, match="roles must alternate") as refused:
        prompt_tokens(chat, Refusing())
    assert param_of(refused.value) == "messages"
