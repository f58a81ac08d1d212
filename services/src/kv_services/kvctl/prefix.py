"""`kvctl prefix`: keep system prompts resident, forget prefixes everywhere, and say why a prompt missed.

`warm` is an ordinary request with the tenant's API key; everything else goes by the nodes' side HTTP ports with the
cluster file's first operator key. A prompt is text (tokenised here), a file of tokens, or the id of a past request.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from rich.table import Table

from kv_core.errors import KVError
from kv_services.config import ClusterConfig, NodeConfig, Role
from kv_services.config_file import load_config
from kv_services.engine.load import EngineSpec, open_text
from kv_services.http_body import read_whole
from kv_services.kvctl.output import console, print_json
from kv_services.kvctl.status import why_silent
from kv_services.launch.signals import run_until_signal
from kv_services.tenants import OPEN_TENANT

TIMEOUT_S: Final = 60.0
ANSWER_BYTES_MAX: Final = 64 << 20
TOKENS_BYTES_MAX: Final = 64 << 20


class PromptError(KVError):
    """No prompt, or more than one, or one that cannot be read."""

    code = 7080
    template = "{cause}"


class PrefixRequestError(KVError):
    """A process does not do what it was asked to."""

    code = 7081
    template = "{node}: {cause}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the command line says of the prompt."""

    text: str = ""
    tokens: Path | None = None
    request: str = ""
    tenant: str = ""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """For how long, and with which priority, a prompt is to be kept before others."""

    ttl_s: int
    priority: int


def warm(file: Path, prompt: Prompt, name: str, as_json: bool, keep: Keep | None = None) -> int:
    """Compute a prompt's KV, pin it if it is given a name, and have it retained if it is to be kept.

    Raises:
        KVError: the file or the prompt is wrong, or a process refuses.
    """
    config = load_config(file)

    async def run(hurry: asyncio.Event) -> int:
        tokens = _tokens(config, prompt)
        tenant = next((one for one in config.tenants if one.id == prompt.tenant), None)
        body: dict[str, Any] = {"model": config.model.id, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        if prompt.cache_salt is not None:
            body["cache_salt"] = prompt.cache_salt
        if keep is not None:
            body["kv_retention"] = {"ttl_s": keep.ttl_s, "priority": keep.priority}
        gateway = _gateway(config)
        answer = await _post(gateway, "/v1/completions", body, tenant.api_keys[0] if tenant else "")
        found: dict[str, Any] = {"cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}
        if name:
            found["pins"] = await _pin(config, prompt, tokens, name)
        _show(found, as_json)
        return 0

    return run_until_signal(run)


def pin(file: Path, prompt: Prompt, name: str, as_json: bool) -> int:
    """Pin what nodes hold of a prompt; exit status 1 when no node holds any of it.

    Raises:
        KVError: as `warm`.
    """
    config = load_config(file)

    async def run(hurry: asyncio.Event) -> int:
        tokens = [] if prompt.request else _tokens(config, prompt)
        pins = await _pin(config, prompt, tokens, name)
        _show({"pins": pins}, as_json)
        return 0 if any(isinstance(one, dict) and one["pinned"] for one in pins.values()) else 1

    return run_until_signal(run)


def unpin(file: Path, name: str, as_json: bool) -> int:
    """Let go of a pin on every node.

    Raises:
        KVError: as `warm`, and when no node has it.
    """
    config = load_config(file)

    async def run(hurry: asyncio.Event) -> int:
        _show({"nodes": await _ask_nodes(config, "/prefix/unpin", {"name": name})}, as_json)
        return 0

    return run_until_signal(run)


def purge(file: Path, tenant: str, weights: str, everything: bool, as_json: bool) -> int:
    """Forget prefixes on every node and in every tier.

    Raises:
        KVError: as `warm`.
    """
    config = load_config(file)
    if sum(map(bool, (tenant, weights, everything))) != 1:
        raise PromptError(cause="give one of --tenant, --weights and --all")
    what, value = ("tenant", tenant) if tenant else ("weights", weights) if weights else ("all", "")

    async def run(hurry: asyncio.Event) -> int:
        # One node says it for all; if it does not answer, the next one is asked.
        problems = []
        for node in config.by_role(Role.PREFILL, Role.DECODE, Role.STORE):
            try:
                found = await _post(node, "/prefix/purge", {"what": what, "value": value}, _operator(config))
            except PrefixRequestError as error:
                problems.append(str(error))
                continue
            _show(found | {"by": node.id}, as_json)
            return 0
        raise PrefixRequestError(node="the cluster", cause="; ".join(problems))

    return run_until_signal(run)


def explain(file: Path, prompt: Prompt, as_json: bool) -> int:
    """Say block by block, for each node and each followed engine, where a prompt's match ends and why.

    Raises:
        KVError: as `warm`.
    """
    config = load_config(file)

    async def run(hurry: asyncio.Event) -> int:
        tokens = [] if prompt.request else _tokens(config, prompt)
        nodes = _ask_nodes(config, "/prefix/explain", _ask(prompt, tokens))
        found, followed = await asyncio.gather(nodes, _ask_followed(config, _ask(prompt, tokens)))
        found |= followed
        if as_json:
            print_json(found)
            return 0
        for node, answer in found.items():
            console().print(answer if isinstance(answer, str) else _table(node, answer))
        return 0

    return run_until_signal(run)


def lookup(file: Path, prompt: Prompt, as_json: bool) -> int:
    """Say who holds how much of a prompt, as the first gateway's index has it.

    Raises:
        KVError: as `warm`.
    """
    config = load_config(file)

    async def run(hurry: asyncio.Event) -> int:
        tokens = _tokens(config, prompt)
        gateway = _gateway(config)
        found = await _post(gateway, "/prefix/lookup", _ask(prompt, tokens), _operator(config))
        if as_json:
            print_json(found)
            return 0
        table = Table("holder", "blocks", "where", "requests", title=f"{found['blocks']} blocks")
        for holder in found["holders"]:
            where = ", ".join(f"{count} {tier}" for tier, count in holder["by_tier"].items())
            table.add_row(holder["node"], str(holder["blocks"]), where, "yes" if holder["takes_requests"] else "no")
        for node, count in found["being_computed"].items():
            table.add_row(node, f"+{count}", "being computed", "yes")
        console().print(table)
        return 0

    return run_until_signal(run)


def _table(node: str, answer: dict[str, Any]) -> Table:
    """Runs of blocks with one verdict are one line."""
    table = Table("blocks", "tokens", "verdict", "why", title=f"{node}: {answer['tokens']} tokens")
    size, rows = answer["block_size"], answer["blocks"]
    said = [(row["verdict"], row["detail"]) for row in rows]
    start = 0
    for at in range(1, len(rows) + 1):
        if at < len(rows) and said[at] == said[start]:
            continue
        blocks = str(start) if at == start + 1 else f"{start}-{at - 1}"
        table.add_row(blocks, f"{start * size}-{at * size - 1}", *said[start])
        start = at
    return table


async def _pin(config: ClusterConfig, prompt: Prompt, tokens: Sequence[int], name: str) -> dict[str, Any]:
    return await _ask_nodes(config, "/prefix/pin", _ask(prompt, tokens) | {"name": name})


def _ask(prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    if prompt.request:
        return {"request_id": prompt.request}
    ask: dict[str, Any] = {"tenant": prompt.tenant or OPEN_TENANT, "tokens": list(tokens)}
    return ask if prompt.cache_salt is None else ask | {"cache_salt": prompt.cache_salt}


def _tokens(config: ClusterConfig, prompt: Prompt) -> list[int]:
    """The tokens that the command line means.

    Raises:
        PromptError: none, several, a file that holds no tokens, or nobody's.
    """
    if sum(map(bool, (prompt.text, prompt.tokens, prompt.request))) != 1 or prompt.request:
        raise PromptError(cause="give one prompt: --text or --tokens, or where a past one will do --request")
    tenants = [one.id for one in config.tenants]
    if prompt.tenant not in (tenants or ("", OPEN_TENANT)):
        known = ", ".join(tenants) or "it has none"
        raise PromptError(cause=f"--tenant {prompt.tenant!r} is none of the cluster file's: {known}")
    if prompt.text:
        path = Path(config.model.path) if config.model.path else None
        _, tokenizer = open_text(EngineSpec(config.model.engine, path, config.model.max_context))
        return list(tokenizer.encode(prompt.text))
    assert prompt.tokens is not None
    try:
        with prompt.tokens.open("rb") as stream:
            raw = stream.read(TOKENS_BYTES_MAX + 1)
        if len(raw) > TOKENS_BYTES_MAX:
            raise PromptError(cause=f"{prompt.tokens}: more than {TOKENS_BYTES_MAX} bytes")
        return msgspec.json.decode(b"[" + raw.strip().strip(b"[]") + b"]", type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise PromptError(cause=f"{prompt.tokens}: expected token ids, as JSON or with commas: {error}") from None


async def _ask_nodes(config: ClusterConfig, path: str, ask: dict[str, Any]) -> dict[str, Any]:
    """What each node that holds KV answers; a text where it refuses.

    Raises:
        PrefixRequestError: every node refuses.
    """
    nodes = config.by_role(Role.PREFILL, Role.DECODE, Role.STORE)

    async def one(node: NodeConfig) -> dict[str, Any] | str:
        try:
            return await _post(node, path, ask, _operator(config))
        except PrefixRequestError as error:
            return str(error)

    answers = await asyncio.gather(*map(one, nodes))
    refused = [answer for answer in answers if isinstance(answer, str)]
    if nodes and len(refused) == len(nodes):
        raise PrefixRequestError(node="no node does it", cause="; ".join(refused))
    return dict(zip((node.id for node in nodes), answers, strict=True))


async def _ask_followed(config: ClusterConfig, ask: dict[str, Any]) -> dict[str, Any]:
    """What became of the prompt at each followed engine, from the first gateway that can say; else why none can."""
    engines = [engine.name for engine in config.kv_events.follow]
    problems = []
    for gateway in config.by_role(Role.GATEWAY) if engines else ():
        try:
            answer = await _post(gateway, "/prefix/explain", ask, _operator(config))
        except PrefixRequestError as error:
            problems.append(str(error))
            continue
        return {name: answer["engines"].get(name, f"{gateway.id}: it does not follow {name}") for name in engines}
    return dict.fromkeys(engines, "; ".join(problems) or "no gateway in the cluster file follows it")


async def _post(node: NodeConfig, path: str, ask: dict[str, Any], key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{node.http_url}{path}", json=ask) as response,
        ):
            raw = await read_whole(response.content, ANSWER_BYTES_MAX)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PrefixRequestError(node=node.id, cause=why_silent(error, TIMEOUT_S)) from error
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if response.status == 200 and isinstance(answer, dict):
        return answer
    error_part = answer.get("error") if isinstance(answer, dict) else None
    cause = error_part.get("message") if isinstance(error_part, dict) else error_part
    raise PrefixRequestError(node=node.id, cause=str(cause or f"it answers {response.status} to {path}"))


def _gateway(config: ClusterConfig) -> NodeConfig:
    """The first gateway.

    Raises:
        PrefixRequestError: the file has none.
    """
    gateways = config.by_role(Role.GATEWAY)
    if not gateways:
        raise PrefixRequestError(
            node=config.cluster.name, cause="its cluster file has no gateway, which this is asked of"
        )
    return gateways[0]


def _operator(config: ClusterConfig) -> str:
    return config.cluster.operator_keys[0] if config.cluster.operator_keys else ""


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if isinstance(value, dict):
            for node, answer in value.items():
                text = answer if isinstance(answer, str) else ", ".join(f"{k} {v}" for k, v in answer.items())
                console().print(f"{node}: {text}")
        else:
            console().print(f"{name}: {value}")
