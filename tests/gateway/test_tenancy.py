"""Who asks, and that nobody can name another tenant's KV."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import TenantId
from kv_services.gateway.errors import AuthenticationError, OpenGatewayError, PermissionDeniedError
from kv_services.gateway.tenancy import OPEN_TENANT, ApiKeys, Caller, fold_salt, is_loopback

KEY_A, KEY_B, KEY_OPS = "a" * 20, "b" * 20, "o" * 20


@dataclass
class Settings:
    tenant_id: TenantId
    api_keys: list[str]
    salt: str = ""
    max_requests: int = 0
    retain_quota: int = 0
    retain_ttl_max_s: int = 3_600


KEYS = ApiKeys([Settings(TenantId("a"), ["x" * 16, KEY_A]), Settings(TenantId("b"), [KEY_B], "pepper")], [KEY_OPS])


def test_each_key_names_its_tenant() -> None:
    assert KEYS.caller(f"Bearer {KEY_A}") == Caller(TenantId("a"))
    assert KEYS.caller(f"bearer  {KEY_B} ") == Caller(TenantId("b"), "pepper")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Basic {KEY_A}", KEY_A, f"Bearer {KEY_A}x", f"Bearer {KEY_OPS}", "\udcff"],
)
def test_anything_else_is_nobody(header: str | None) -> None:
    with pytest.raises(AuthenticationError):
        KEYS.caller(header)


def test_without_keys_everybody_is_the_one_tenant_of_loopback() -> None:
    keys = ApiKeys()
    assert keys.open
    assert keys.caller(None).tenant == keys.caller("Bearer whatever").tenant == OPEN_TENANT
    keys.check_operator(None)
    keys.check_bind("127.0.0.1")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(OpenGatewayError):
            keys.check_bind(host)


def test_with_keys_any_address_may_be_served() -> None:
    KEYS.check_bind("10.0.0.1")


def test_only_operators_see_what_tells_of_all_tenants() -> None:
    KEYS.check_operator(f"Bearer {KEY_OPS}")
    with pytest.raises(PermissionDeniedError):
        KEYS.check_operator(f"Bearer {KEY_A}")
    for header in (None, "Bearer nobody"):
        with pytest.raises(AuthenticationError):
            KEYS.check_operator(header)


def test_a_caller_does_not_show_its_salt() -> None:
    assert "pepper" not in repr(Caller(TenantId("b"), "pepper"))


parts = st.text("ab1", max_size=3)


@given(st.tuples(parts, parts, st.none() | parts), st.tuples(parts, parts, st.none() | parts))
def test_salts_are_equal_only_for_the_same_tenant_and_the_same_words(
    one: tuple[str, str, str | None], other: tuple[str, str, str | None]
) -> None:
    folded = [fold_salt(Caller(TenantId(tenant), salt), given_salt) for tenant, salt, given_salt in (one, other)]
    assert (folded[0] == folded[1]) == (one == other)


def test_a_salt_is_the_same_in_every_process() -> None:
    mark = "1d1335447b7979a5"
    assert fold_salt(Caller(TenantId("a"), "s"), "c") == f"{mark}.418bede0f1e2ea206d9e55e6c20036a6"
    assert fold_salt(Caller(TenantId("a"), "s")).startswith(f"{mark}.")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "LOCALHOST."])
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "localhost.example.com", "127.0.0.1.nip.io", "192.168.0.1"])
def test_other_names_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)
