"""What the clients of a run ask, and the one right answer to each."""

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from kv_core.dtypes import DType
from kv_services.config import ModelSection
from kv_services.engine.interface import SamplingParams
from kv_services.engine.llama import LlamaModel
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.threads import set_blas_threads
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import open_weights
from tests.engine.helpers_engine import TinyLlama, arena
from tests.integration.helpers_integration import MODEL, expected, prompt

SHARED: Final = 96
PIECES_BLOCK: Final = 4
PIECES_SLOTS: Final = 20
PIECES_LENGTHS: Final = (40, 150, 240)
"""With 20 slots of 4 tokens a node: one that a node holds, one that is cut by layer, one whose layers are too long."""

PIECES_PROMPTS: Final = 12
MARGIN_MIN: Final = 0.02
"""Between the likeliest token and the next. Sums in another order, as of a sequence cut by tokens, decide otherwise
only where two are as good as equal, so such prompts are not asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how many tokens are asked for, and the text that they are."""

    tokens: tuple[int, ...]
    count: int
    answer: bytes


class Questions(Protocol):
    """What a run asks.

    Attributes:
        model, slots: what the cluster must serve, and with how many slots at each node.
    """

    model: ModelSection
    slots: int

    def question(self, client: int, turn: int) -> Question:
        """What a client asks in its turn."""
        ...


class StubQuestions:
    """Prompts of the stub engine, two of three with a common beginning; each is asked once."""

    model = MODEL
    slots = 160

    def __init__(self, count: int) -> None:
        self._count = count

    def question(self, client: int, turn: int) -> Question:
        shared = SHARED if turn % 3 else 0
        tokens = prompt(10_000 * client + turn, 120 + (turn * 13 + client) % 80, shared)
        return Question(tokens, self._count, expected(tokens, self._count))


class PiecesQuestions:
    """Prompts of a tiny model at nodes so small that two of three are held by several.

    Args:
        folder: where its weights are written and unpacked; `XDG_CACHE_HOME` of the cluster's processes.
    """

    slots = PIECES_SLOTS

    def __init__(self, folder: Path, count: int) -> None:
        set_blas_threads(1)
        folder.mkdir(parents=True)
        path = TinyLlama(context=512).write(folder / "tiny.gguf")
        weights = open_weights(path, folder / "kv-fabric" / "weights")
        self.model = ModelSection(id="tiny", path=str(path), kv_dtype="fp32", block_size=PIECES_BLOCK)
        self._count = count
        self._engine = LlamaModel(weights)
        self._tokenizer = BpeTokenizer(weights.tokenizer_json, weights.text)
        self._made: list[Question] = []
        seed = 0
        while len(self._made) < PIECES_PROMPTS:
            made = self._make(seed, PIECES_LENGTHS[len(self._made) % len(PIECES_LENGTHS)])
            self._made += [made] if made is not None else []
            seed += 1

    def question(self, client: int, turn: int) -> Question:
        return self._made[(client + turn) % len(self._made)]

    def _make(self, seed: int, length: int) -> Question | None:
        tokens = tuple(int(token) for token in np.random.default_rng(seed).integers(4, 260, length))
        single = SingleProcess(self._engine, arena(self._engine, 200, PIECES_BLOCK, DType.FP32))
        params = SamplingParams(temperature=0.0, top_logprobs=2)
        (got,) = single.generate([GenerationRequest(tokens, self._count, params)])
        best = [list(token.top_logprobs.values()) for token in got.tokens]
        if got.stopped or any(first - second < MARGIN_MIN for first, second in best):
            return None
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(
            b"".join(map(self._tokenizer.token_bytes, got.ids))
        )
        return Question(tokens, self._count, text.encode())
