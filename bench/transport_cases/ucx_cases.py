"""ucx: a put through the engine against the same put straight through the binding."""

from collections.abc import Iterator

from bench.transport_cases.plan import Effort, Outcome, Skipped


def ucx_cases(effort: Effort) -> Iterator[Outcome]:
    yield Skipped("ucx_put_over_tcp", "this version has no ucx transport")
