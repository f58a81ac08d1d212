"""`kvctl demo` from start to end: cluster, requests, single process, stop, report.

The single process runs after the requests, so that it takes no time from them, and before the cluster is stopped, so
that what it leaves is looked for too.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from kv_core.clock import SystemClock
from kv_services.config import ClusterConfig
from kv_services.engine.weights import find_weights
from kv_services.kvctl.demo.client import LINE_BYTES_MAX, Answer, RequestFailedError, ask, heard_of
from kv_services.kvctl.demo.profile import CONCURRENCY, MAX_TOKENS, demo_config
from kv_services.kvctl.demo.prompts import chat
from kv_services.kvctl.demo.reference import ReferenceAnswer, run_reference
from kv_services.kvctl.demo.report import Outcome, print_outcome
from kv_services.kvctl.demo.screen import Screen
from kv_services.kvctl.output import console, messages, print_json
from kv_services.launch.cluster import LocalCluster
from kv_services.launch.group import Command, service_command
from kv_services.launch.ports import PortReservation
from kv_services.launch.signals import run_until_signal


def run(num_requests: int, model: Path | None, as_json: bool, keep: bool, command: Command = service_command) -> int:
    """Run the demo and print what came of it; 1 if a request failed, a token differs or something stays behind.

    Raises:
        WeightsMissingError: there is no such model; nothing was started.
        LaunchError: the cluster did not start.
    """
    find_weights(model)
    return run_until_signal(lambda hurry: _demo(num_requests, model, as_json, keep, command, hurry))


async def _demo(
    num_requests: int, model: Path | None, as_json: bool, keep: bool, command: Command, hurry: asyncio.Event
) -> int:
    with PortReservation() as ports:
        config = demo_config(ports, model)
        with Screen(config, num_requests) as screen:
            screen.stage(f"starting {len(config.nodes)} processes")
            cluster = LocalCluster(config, keep=keep, command=command, on_change=screen.process, hurry=hurry)
            async with cluster:
                screen.stage(f"{num_requests} chat requests, {CONCURRENCY} at a time")
                answers, wall_s = await _ask_all(config, num_requests, screen)
                reference = await _single_process(cluster, num_requests, screen)
                screen.stage("stopping")
    outcome = Outcome(answers, reference, len(config.nodes), cluster.leftovers, wall_s)
    print_outcome(console(), outcome)
    if keep:
        messages().print(f"logs and state are in {cluster.folder}", markup=False)
    if as_json:
        print_json(outcome.as_object())
    return 0 if outcome.succeeded else 1


async def _ask_all(config: ClusterConfig, num_requests: int, screen: Screen) -> tuple[list[Answer | None], float]:
    clock = SystemClock()
    turns = asyncio.Semaphore(CONCURRENCY)
    gateway = config.node("gateway").http_url
    timeout = aiohttp.ClientTimeout(total=config.limits.request_timeout_s)

    async def one(session: aiohttp.ClientSession, number: int) -> Answer | None:
        async with turns:
            screen.sent(number)
            try:
                answer = await ask(
                    session,
                    gateway,
                    config.model.id,
                    number + 1,
                    chat(number),
                    MAX_TOKENS,
                    lambda text: screen.token(number, text),
                )
            except RequestFailedError as error:
                screen.failed(number, str(error))
                return None
            screen.answered(number, answer)
            return answer

    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=LINE_BYTES_MAX) as session:
        await heard_of(session, gateway, [node.id for node in config.nodes if node.role.holds_kv])
        began_ns = clock.monotonic_ns()
        answers = await asyncio.gather(*(one(session, number) for number in range(num_requests)))
    return list(answers), (clock.monotonic_ns() - began_ns) / 1e9


async def _single_process(cluster: LocalCluster, num_requests: int, screen: Screen) -> Sequence[ReferenceAnswer]:
    screen.stage(f"the same {num_requests} prompts in one process")
    return await run_reference(
        cluster.folder,
        cluster.config_file,
        [chat(number) for number in range(num_requests)],
        MAX_TOKENS,
        lambda count: screen.stage(f"the same prompts in one process: {count} of {num_requests}"),
    )
