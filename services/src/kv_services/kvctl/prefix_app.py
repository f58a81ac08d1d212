"""The commands of `kvctl prefix`, their options and their help."""

from pathlib import Path
from typing import Annotated

import typer

from kv_services.kvctl.guard import ConfigFile, Json, guarded

prefix_app = typer.Typer(help="Keep, forget and explain prefixes.", no_args_is_help=True)

Text = Annotated[str, typer.Option(help="The prompt, as text.")]
Tokens = Annotated[Path | None, typer.Option(help="A file of token ids: JSON, or numbers with commas.")]
Request = Annotated[str, typer.Option(help="The id of a past request, as X-Request-Id gave it.")]
Tenant = Annotated[str, typer.Option(help="Whose prompt it is; not needed without tenants.")]
CacheSalt = Annotated[str | None, typer.Option(help="The cache_salt that the request carries.")]
Name = Annotated[str, typer.Option(help="The pin's name.")]


@prefix_app.command("warm")
@guarded
def warm(
    file: ConfigFile,
    text: Text = "",
    tokens: Tokens = None,
    tenant: Tenant = "",
    cache_salt: CacheSalt = None,
    pin: Annotated[str, typer.Option(help="Also pin it under this name.")] = "",
    keep_s: Annotated[int, typer.Option(min=0, help="Keep it before others for so many seconds, without a pin.")] = 0,
    priority: Annotated[int, typer.Option(min=0, max=100, help="With --keep-s: the lowest goes first.")] = 50,
    json: Json = False,
) -> int:
    """Compute a prompt's KV now, so that the first request that begins with it hits."""
    from kv_services.kvctl import prefix

    keep = prefix.Keep(keep_s, priority) if keep_s else None
    return prefix.warm(file, prefix.Prompt(text, tokens, "", tenant, cache_salt), pin, json, keep)


@prefix_app.command("pin")
@guarded
def pin(
    file: ConfigFile,
    name: Name,
    text: Text = "",
    tokens: Tokens = None,
    request: Request = "",
    tenant: Tenant = "",
    cache_salt: CacheSalt = None,
    json: Json = False,
) -> int:
    """Keep a prompt's full blocks in memory where they are held, within quotas, until unpin, purge or restart."""
    from kv_services.kvctl import prefix

    return prefix.pin(file, prefix.Prompt(text, tokens, request, tenant, cache_salt), name, json)


@prefix_app.command("unpin")
@guarded
def unpin(file: ConfigFile, name: Name, json: Json = False) -> int:
    """Let go of a pin."""
    from kv_services.kvctl import prefix

    return prefix.unpin(file, name, json)


@prefix_app.command("purge")
@guarded
def purge(
    file: ConfigFile,
    tenant: Annotated[str, typer.Option(help="Everything of this tenant.")] = "",
    weights: Annotated[str, typer.Option(help="Everything of this revision of the weights.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Everything of the cluster's model.")] = False,
    json: Json = False,
) -> int:
    """Forget prefixes: on every node, in memory and in every tier."""
    from kv_services.kvctl import prefix

    return prefix.purge(file, tenant, weights, everything, json)


@prefix_app.command("lookup")
@guarded
def lookup(
    file: ConfigFile,
    text: Text = "",
    tokens: Tokens = None,
    tenant: Tenant = "",
    cache_salt: CacheSalt = None,
    json: Json = False,
) -> int:
    """Say which nodes, and which followed engines, hold how much of a prompt, as the first gateway's index has it."""
    from kv_services.kvctl import prefix

    return prefix.lookup(file, prefix.Prompt(text, tokens, "", tenant, cache_salt), json)


@prefix_app.command("explain")
@guarded
def explain(
    file: ConfigFile,
    text: Text = "",
    tokens: Tokens = None,
    request: Request = "",
    tenant: Tenant = "",
    cache_salt: CacheSalt = None,
    json: Json = False,
) -> int:
    """Say block by block where each node's match of a prompt ends, and why; and what followed engines did with it."""
    from kv_services.kvctl import prefix

    return prefix.explain(file, prefix.Prompt(text, tokens, request, tenant, cache_salt), json)
