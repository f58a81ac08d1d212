"""Who may call what: keys, tenants, operators, and web pages that find their way to loopback."""

import json
from dataclasses import dataclass

import openai
import pytest

from kv_core.ids import TenantId
from kv_services.gateway.tenancy import ApiKeys
from tests.gateway.helpers_http import Served, say, serving

KEY_A, KEY_B, KEY_OPS = "a" * 20, "b" * 20, "o" * 20
BODY = {"model": "m", "prompt": "x"}
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/m",
    "/metrics",
    "/status",
    "/prefix/lookup",
    "/prefix/explain",
]


@dataclass
class Settings:
    tenant_id: TenantId
    api_keys: list[str]
    salt: str = ""
    max_requests: int = 0
    retain_quota: int = 0
    retain_ttl_max_s: int = 3_600


def keys() -> ApiKeys:
    return ApiKeys([Settings(TenantId("a"), [KEY_A]), Settings(TenantId("b"), [KEY_B])], [KEY_OPS])


async def get(served: Served, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return (await served.call(path, headers=headers))[0]


async def test_without_credentials_no_route_does_or_tells_anything() -> None:
    async with serving(say("x"), keys=keys()) as served:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
        for path in [*PATHS, "/", "/v1/admin", "/run_script", "/docs", "/openapi.json", "/debug"]:
            for method in methods:
                status, _, raw = await served.call(path, BODY if method == "POST" else None, method=method)
                assert status in (401, 404, 405), (method, path)
                assert b"kv_up" not in raw and b"nodes" not in raw and b'"m"' not in raw
        assert served.completer.requests == []
        status, _, raw = await served.call("/healthz")
        assert (status, json.loads(raw)) == (200, {"status": "ok"})


@pytest.mark.parametrize("authorization", ["", "Bearer", f"Bearer {KEY_A}x", f"Basic {KEY_A}", f"Bearer {KEY_OPS}"])
async def test_a_wrong_key_is_refused_before_the_body_is_read(authorization: str) -> None:
    async with serving(say("x"), keys=keys()) as served:
        status, headers, raw = await served.call(
            "/v1/completions", b"{" * 5000, headers={"Authorization": authorization}
        )
        assert (status, json.loads(raw)["error"]["code"]) == (401, "invalid_api_key")
        assert headers["WWW-Authenticate"] == "Bearer"
        assert KEY_A not in raw.decode()
        assert [(record.tenant, record.outcome) for record in served.records] == [("", "invalid_api_key")]


async def test_the_client_package_shows_a_bad_key_as_such() -> None:
    async with serving(say("x"), keys=keys()) as served:
        async with served.client("nobody") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="m", prompt="x")
        async with served.client(KEY_B) as client:
            await client.completions.create(model="m", prompt="x")
        assert served.completer.requests[0].tenant == "b"


async def test_what_tells_of_all_tenants_is_for_operators() -> None:
    async with serving(keys=keys()) as served:
        for path in ("/metrics", "/status"):
            assert await get(served, path, KEY_OPS) == 200
            assert await get(served, path, KEY_A) == 403
            assert await get(served, path, None) == 401
        assert await get(served, "/v1/models", KEY_A) == 200
        assert await get(served, "/v1/models", KEY_OPS) == 401


async def test_who_holds_what_of_a_prompt_is_told_to_operators_only() -> None:
    async with serving(keys=keys()) as served:
        for path, told in (("/prefix/lookup", "holders"), ("/prefix/explain", "engines")):
            for key, status in ((KEY_OPS, 200), (KEY_A, 403), ("", 401)):
                found, _, raw = await served.call(path, {"tokens": [1]}, headers={"Authorization": f"Bearer {key}"})
                assert found == status and (b"nodes" in raw) == (status == 200)
            status, _, raw = await served.call(path, {"tokens": [1]}, headers={"Authorization": f"Bearer {KEY_OPS}"})
            assert told in json.loads(raw)
            assert await get(served, path, KEY_OPS) == 405
        status, _, raw = await served.call("/prefix/explain", {}, headers={"Authorization": f"Bearer {KEY_OPS}"})
        assert (status, json.loads(raw)["error"]["type"]) == (400, "invalid_request_error")


async def test_an_operators_key_is_asked_for_without_tenants_too() -> None:
    """As every other process of the cluster asks for it."""
    async with serving(say("x"), keys=ApiKeys((), [KEY_OPS])) as served:
        for path in ("/metrics", "/status"):
            assert await get(served, path, KEY_OPS) == 200
            assert await get(served, path, KEY_A) == 401
            assert await get(served, path, None) == 401
        assert (await served.call("/v1/completions", BODY))[0] == 200


async def test_without_keys_metrics_and_status_are_open_on_loopback() -> None:
    async with serving() as served:
        status, headers, raw = await served.call("/metrics")
        assert (status, raw) == (200, b"kv_up 1\n")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        status, headers, raw = await served.call("/status")
        assert (status, headers["Content-Type"], json.loads(raw)) == (200, "application/json", {"nodes": []})


async def test_no_word_of_a_client_leads_into_another_tenants_namespace() -> None:
    async with serving(say("x"), keys=keys()) as served:
        salts: dict[tuple[str, str | None], str] = {}
        for tenant, key in (("a", KEY_A), ("b", KEY_B)):
            for word in (None, "a", "b", "shared"):
                body = BODY if word is None else BODY | {"cache_salt": word, "user": "b"}
                headers = {"Authorization": f"Bearer {key}", "OpenAI-Organization": "b", "OpenAI-Project": "b"}
                assert (await served.call("/v1/completions", body, headers=headers))[0] == 200
                request = served.completer.requests[-1]
                assert request.tenant == tenant
                assert request.kv.shared == (word is None)
                salts[tenant, word] = request.kv.salt
        assert len(set(salts.values())) == len(salts)
        # Knowing another tenant's salt is no way in: it is only a word below the own tenant.
        stolen = BODY | {"cache_salt": salts["b", None]}
        await served.call("/v1/completions", stolen, headers={"Authorization": f"Bearer {KEY_A}"})
        assert served.completer.requests[-1].kv.salt not in salts.values()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.5"])
async def test_an_open_gateway_answers_under_loopback_names_only(host: str) -> None:
    async with serving(say("x")) as served:
        for path, body in (("/v1/completions", BODY), ("/v1/models", None), ("/status", None), ("/nothing", None)):
            status, _, raw = await served.call(path, body, headers={"Host": host})
            assert (status, json.loads(raw)["error"]["code"]) == (403, "permission_denied")
        assert served.completer.requests == []


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:1", "[::1]:80", "LocalHost"])
async def test_loopback_names_are_answered(host: str) -> None:
    async with serving(say("x")) as served:
        assert (await served.call("/v1/completions", BODY, headers={"Host": host}))[0] == 200


async def test_a_gateway_with_keys_answers_under_any_name() -> None:
    async with serving(say("x"), keys=keys()) as served:
        headers = {"Host": "llm.example.com", "Authorization": f"Bearer {KEY_A}"}
        assert (await served.call("/v1/completions", BODY, headers=headers))[0] == 200


async def test_a_page_of_another_origin_gets_no_permission() -> None:
    async with serving(say("x")) as served:
        asking = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        status, headers, _ = await served.call("/v1/completions", method="OPTIONS", headers=asking)
        assert status == 405
        assert not any(name.lower().startswith("access-control") for name in headers)
        # What a page may send without asking is of another content type.
        for simple in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            sent = {"Content-Type": simple, "Origin": "https://evil.example"}
            assert (await served.call("/v1/completions", json.dumps(BODY).encode(), headers=sent))[0] == 415
        assert served.completer.requests == []
