"""What clients do in a run: requests whose every token is known beforehand, and reads that follow causal tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kv_consistency.errors import IncompleteError
from kv_consistency.update import OwnerEpoch
from kv_consistency.version_vector import CausalToken
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.ids import RequestId, TenantId
from kv_services.config import Role
from kv_services.gateway.completer import Finished, FinishReason, GenerationRequest, KVOptions, SamplingParams, Token
from kv_services.sim.causality import CausalOracle
from kv_services.sim.holdings import BLOCK_SIZE
from kv_services.sim.node import MODEL, REQUEST_TIMEOUT_S, SimNode

ANSWER_MAX: Final = 10
GRACE_NS: Final = 500_000_000
"""How long after its deadline a request, or a read that waits, may be told so."""
READ_TIMEOUT_NS: Final = 1_000_000_000


class AnswerError(KVError):
    """A client was given something else than the right answer in time."""

    code = 7093
    template = "{request_id} {what}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the one right answer to it."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


def make_prompts(rng: Random, count: int = 30) -> list[Prompt]:
    """Prompts of which some begin alike, as with a common system prompt."""
    geometry = MODEL.info.geometry.block_geometry(DType.FP16, BLOCK_SIZE)
    stems = [tuple(rng.randrange(32, 127) for _ in range(rng.randint(2, 5) * BLOCK_SIZE)) for _ in range(4)]
    prompts = []
    for _ in range(count):
        own = tuple(rng.randrange(32, 127) for _ in range(rng.randint(1, 5 * BLOCK_SIZE)))
        tokens = rng.choice(stems) + own
        answer: tuple[int, ...] = ()
        for _ in range(ANSWER_MAX):
            answer += (MODEL.expected_token([*tokens, *answer], geometry),)
        prompts.append(Prompt(tokens, answer))
    return prompts


class Workload:
    """Clients of all gateways."""

    def __init__(
        self,
        nodes: list[SimNode],
        oracle: CausalOracle,
        rng: Random,
        note: Callable[[str], None],
        prompts: list[Prompt],
    ) -> None:
        self._nodes = nodes
        self._gateways = [node for node in nodes if node.role is Role.GATEWAY]
        self._oracle = oracle
        self._random = rng
        self._note = note
        self._prompts = prompts
        self._clients: dict[asyncio.Task[object], None] = {}
        self.requests = self.failed = self.cancelled = self.reads = self.reads_refused = 0
        self.errors: dict[str, int] = {}
        self._serial = 0
        self.stopping = False

    async def ask(self) -> None:
        """Send requests at random times, until `stopping`."""
        while not self.stopping:
            await asyncio.sleep(0.05 + self._random.random() * 0.7)
            ready = [node for node in self._gateways if node.ready and not node.pauses]
            if ready:
                self._start(self._random.choice(ready), self.request)

    async def read(self) -> None:
        """Follow tokens from node to node, until `stopping`."""
        while not self.stopping:
            await asyncio.sleep(0.05 + self._random.random() * 0.3)
            recent = self._oracle.requests()[-12:]
            ready = [node for node in self._nodes if node.ready and not node.pauses]
            if recent and len(ready) >= 2:
                source, target = self._random.sample(ready, 2)
                self._read_at(source, target, self._random.choice(recent))

    async def ended(self) -> None:
        """Return when every client has its answer; raises what one of them found wrong, or that one never ends."""
        if self._clients:
            _, pending = await asyncio.wait(self._clients, timeout=2 * REQUEST_TIMEOUT_S)
            self.check()
            for task in self._clients:
                if task in pending:
                    raise AnswerError(request_id=task.get_name(), what="never ends")

    def check(self) -> None:
        """Raise what a client found wrong so far."""
        for task in [task for task in self._clients if task.done()]:
            del self._clients[task]
            task.result()

    async def request(self, gateway: SimNode, patient: bool = False) -> bool:
        """One request; whether it succeeded. `patient`: never cancelled, and its failure is an `AnswerError`.

        Raises:
            AnswerError: a token was wrong, missing, double or late.
        """
        completer = gateway.completer
        assert completer is not None
        random, prompt = self._random, self._random.choice(self._prompts)
        self.requests += 1
        request_id = RequestId(f"request-{self.requests}")
        max_tokens = random.randint(1, ANSWER_MAX)
        cancel_at = max_tokens + 1 if patient or random.random() < 0.9 else random.randrange(max_tokens)
        now_ns, stood_ns = gateway.clock.monotonic_ns(), gateway.stood_still_ns
        deadline_ns = now_ns + int(REQUEST_TIMEOUT_S * 1e9)
        request = GenerationRequest(
            request_id=request_id,
            tenant=TenantId(""),
            model="sim",
            prompt_token_ids=prompt.tokens,
            sampling=SamplingParams(max_tokens, temperature=0.0),
            stop_token_ids=(),
            deadline_ns=deadline_ns,
            received_ns=now_ns,
            kv=KVOptions(salt=""),
        )
        given: list[int] = []
        outcome = "nothing"
        try:
            stream = completer.submit(request)
            async for event in stream:
                if isinstance(event, Token):
                    if event.index != len(given) or event.token_id != prompt.answer[event.index]:
                        expected = f"token {len(given)} = {prompt.answer[len(given) : len(given) + 1]}"
                        raise AnswerError(request_id=request_id, what=f"was given {event}, right is {expected}")
                    given.append(event.token_id)
                    if len(given) > cancel_at:
                        stream.cancel()
                        self.cancelled += 1
                        outcome = "cancelled"
                else:
                    outcome = self._finished(event, request_id, len(given), max_tokens)
        except AnswerError:
            raise
        except KVError as error:
            outcome = type(error).__name__
            self.failed += 1
            self.errors[outcome] = self.errors.get(outcome, 0) + 1
            if patient:
                raise AnswerError(request_id=request_id, what=f"failed when nothing was wrong: {error}") from error
        late_ns = gateway.clock.monotonic_ns() - deadline_ns - (gateway.stood_still_ns - stood_ns)
        if late_ns > GRACE_NS:
            raise AnswerError(request_id=request_id, what=f"ended {late_ns / 1e9:.3f} s after its deadline ({outcome})")
        self._note(f"{request_id} {outcome} {len(given)}")
        return outcome == "ok"

    def _finished(self, end: Finished, request_id: RequestId, given: int, max_tokens: int) -> str:
        if end.reason is not FinishReason.LENGTH or given != max_tokens or end.usage.completion_tokens != given:
            raise AnswerError(request_id=request_id, what=f"ended as {end} with {given} of {max_tokens} tokens")
        return "ok"

    def _start(self, node: SimNode, work: "Callable[[SimNode], asyncio._CoroutineLike[object]]") -> None:
        # Whoever serves the client runs in the node, and stands still and ends with it.
        task = node.within(work(node))
        self._serial += 1
        task.set_name(f"client {self._serial} at {node.name}")
        self._clients[task] = None

    def _read_at(self, source: SimNode, target: SimNode, request_id: RequestId) -> None:
        try:
            entry = source.replica.manager.entry(request_id)
        except KVError:
            return

        # Whoever was given the token comes back with it at once, or later than others went on.
        pause_s = self._random.expovariate(2.0) if self._random.random() < 0.5 else 0.0

        async def read(node: SimNode) -> None:
            await asyncio.sleep(pause_s)
            if node.ready:
                await self._follow(node, request_id, entry.seq_len, entry.epoch, entry.token)

        self._start(target, read)

    async def _follow(
        self, node: SimNode, request_id: RequestId, length: int, epoch: OwnerEpoch, token: CausalToken
    ) -> None:
        """Read after a token: what whoever gave it out saw is seen here too, or the read says why not, in time."""
        self.reads += 1
        replica, stood_ns = node.replica, node.stood_still_ns
        deadline_ns = node.clock.monotonic_ns() + READ_TIMEOUT_NS
        try:
            async with asyncio.timeout(3 * READ_TIMEOUT_NS / 1e9):
                await replica.caught_up(token.to_bytes(), deadline_ns)
            replica.manager.verify_readable(request_id, length, after=token, epoch=epoch)
        except IncompleteError as error:
            raise AnswerError(request_id=request_id, what=f"at {node.name}, after {token}: {error}") from error
        except KVError as error:
            self.reads_refused += 1
            self._note(f"read {request_id} {type(error).__name__}")
        except asyncio.CancelledError:
            # That life of the node ended, or the whole run did.
            self.reads_refused += 1
            return
        except TimeoutError:
            # A replica that ends judges no deadline, and one that stood still may come to it after our timer.
            stood = node.stood_still_ns > stood_ns or node.pauses
            if node.running and node.replica is replica and not node.ending and not stood:
                raise AnswerError(request_id=request_id, what=f"its reader at {node.name} is never told") from None
            self.reads_refused += 1
            return
        late_ns = node.clock.monotonic_ns() - deadline_ns - (node.stood_still_ns - stood_ns)
        if late_ns > GRACE_NS:
            raise AnswerError(request_id=request_id, what=f"its reader at {node.name} waited {late_ns} ns too long")
