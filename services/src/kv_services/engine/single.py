"""Generation in one process over the same engine: what the cluster's tokens are compared with.

Computes exactly as nodes do (KV of all prompt tokens but the last by `prefill`, that one and the answer by `decode`)
and reuses prefixes at any length: whole blocks are shared, a block that both sequences would fill on is copied.

G1: `free + held == total` slots, where a slot is held as long as any sequence refers to it. G2: a block that two
sequences share is never written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_services.engine.errors import EngineInputError, NoSlotsError
from kv_services.engine.interface import (
    DecodeInput,
    DecodeOutput,
    Model,
    NoHooks,
    PagedKV,
    Parked,
    SampledToken,
    SamplingParams,
    StepFailed,
    Stepped,
)
from kv_services.engine.sampling import sample


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to make.

    Attributes:
        prompt: at least one token.
        max_tokens: tokens to generate at most, at least 1.
        params: how each is chosen.
        stop_ids: tokens that end the answer; None for the model's own. The one that does is part of the answer.
    """

    prompt: Sequence[int]
    max_tokens: int
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stop_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer; `reused` prompt tokens had their KV already."""

    tokens: tuple[SampledToken, ...]
    stopped: bool
    reused: int

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]


@dataclass(slots=True, eq=False)
class _Sequence:
    tokens: list[int]
    slots: list[int]
    stored: int = 0  # tokens whose KV is in the blocks
    reused: int = 0
    answer: list[SampledToken] = field(default_factory=list)
    stopped: bool = False


class SingleProcess:
    """Answers batches of requests with one model and one arena. Keeps what it computed for reuse until the arena is
    full, then gives up the oldest first. Not for use by several threads."""

    def __init__(self, model: Model, kv: PagedKV) -> None:
        self._model, self._kv = model, kv
        self._free = list(range(kv.num_slots - 1, -1, -1))
        self._references = [0] * kv.num_slots
        self._kept: list[_Sequence] = []

    @property
    def free_slots(self) -> int:
        """Slots that no sequence, running or kept, refers to."""
        return len(self._free)

    def forget(self) -> None:
        """Give up everything that is kept for reuse."""
        while self._kept:
            self._release(self._kept.pop())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Answer a batch, decoding all of it together.

        Raises:
            NoSlotsError: they do not fit the arena together; nothing is held of them.
            EngineInputError, ContextLengthError: a request that the model cannot take.
        """
        running: list[_Sequence] = []
        try:
            for request in requests:
                if not request.prompt or request.max_tokens < 1:
                    raise EngineInputError(field="request", value="empty", expected="a prompt and max_tokens over 0")
                sequence = self._begin(request, running)
                running.append(sequence)
                if sequence.stored < len(sequence.tokens) - 1:
                    missing = sequence.tokens[sequence.stored : -1]
                    self._model.prefill(self._kv, missing, sequence.stored, sequence.slots, NoHooks())
                    sequence.stored = len(sequence.tokens) - 1
            pairs = list(zip(requests, running, strict=True))
            while active := [(r, s) for r, s in pairs if not s.stopped and len(s.answer) < r.max_tokens]:
                self._step(active)
        except BaseException:
            for sequence in running:
                self._release(sequence)
            raise
        self._kept += running
        return [Generation(tuple(s.answer), s.stopped, s.reused) for s in running]

    def _step(self, active: list[tuple[GenerationRequest, _Sequence]]) -> None:
        batch = [DecodeInput(s.tokens[-1], len(s.tokens) - 1, s.slots) for _, s in active]
        for (request, sequence), output in zip(active, self._model.decode(self._kv, batch), strict=True):
            chosen = _choose(output, request.params, len(sequence.tokens))
            sequence.stored = len(sequence.tokens)
            sequence.tokens.append(chosen.token)
            sequence.answer.append(chosen)
            stop_ids = self._model.info.eos_ids if request.stop_ids is None else request.stop_ids
            sequence.stopped = chosen.token in stop_ids

    def _begin(self, request: GenerationRequest, running: list[_Sequence]) -> _Sequence:
        """Blocks for a request: shared as far as its prefix is known, copied where it ends inside a block."""
        prompt = list(request.prompt)
        donor, common = None, 0
        for other in (*self._kept, *running):
            length = min(_common(prompt, other.tokens), other.stored, len(prompt) - 1)
            if length > common:
                donor, common = other, length
        try:
            return self._place(prompt, request.max_tokens, donor, common)
        except NoSlotsError:
            # What would be reused may itself be what stands in the way.
            return self._place(prompt, request.max_tokens, None, 0)

    def _place(self, prompt: list[int], max_tokens: int, donor: _Sequence | None, common: int) -> _Sequence:
        size = self._kv.geometry.block_size
        shared = donor.slots[: common // size] if donor else []
        total = -(-(len(prompt) + max_tokens - 1) // size)
        slots = shared + self._take(total - len(shared), keep=donor)
        for slot in shared:
            self._references[slot] += 1
        if donor and common % size:
            for layer in range(self._kv.geometry.num_layers):
                view = self._kv.kv(layer)
                view[slots[len(shared)]] = view[donor.slots[len(shared)]]
        return _Sequence(prompt, slots, stored=common, reused=common)

    def _take(self, count: int, keep: _Sequence | None) -> list[int]:
        while len(self._free) < count:
            victim = next((sequence for sequence in self._kept if sequence is not keep), None)
            if victim is None:
                raise NoSlotsError(need=count, free=len(self._free))
            self._kept.remove(victim)
            self._release(victim)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._references[slot] += 1
        return slots

    def _release(self, sequence: _Sequence) -> None:
        self._drop(sequence.slots)
        sequence.slots = []

    def _drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                self._free.append(slot)


def _choose(output: DecodeOutput, params: SamplingParams, position: int) -> SampledToken:
    match output:
        case Stepped(logits):
            return sample(logits, params, position)
        case StepFailed(error):
            raise error
        case Parked(layer):
            raise EngineInputError(field="parked", value=layer, expected="nothing to be in transfer here")


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(differs[0]) if len(differs) else length
