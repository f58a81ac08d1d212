"""What FP8 does to answers: the real model, its KV exact and after a codec, over 8 prompts and 1,000 tokens each.

Every token is teacher-forced: three copies of a sequence get the same tokens, so that differences add up in the KV and
nowhere else. The tokens are the exact copy's own most likely ones, or, with `--draw sampled`, drawn from what it
predicts (temperature 1, fixed seed), which leads a small model to places where it is sure of nothing: the harder test.

- `exact` keeps KV in bf16, as it was computed.
- `handed over` has the prompt's KV after the codec, as a decode node has it, and what it computes itself in bf16.
- `all blocks` sends every block through the codec as soon as it is full: for information, what no hand-over does.

Agreement is how often the most likely token is the exact copy's; the cosine is that of the two rows of logits;
perplexity is of the drawn tokens. `make_table` in this file prints what docs/fp8-accuracy.md holds.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_services.engine.interface import ChatMessage, DecodeInput, NoHooks, Stepped
from kv_services.engine.llama import LlamaModel
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import open_weights
from kv_transport.codecs import Codec, decode_cell, encode_cell, encoded_cell_nbytes

BLOCK_SIZE: Final = 16
COPIES: Final = ("exact", "handed over", "all blocks")
AGREEMENT_NEED: Final = 0.985
COSINE_MEAN_NEED: Final = 0.9995
COSINE_LOW_NEED: Final = 0.996

PROMPTS: Final = (
    "A river rises in the hills, runs past three towns and reaches the sea after two hundred miles. Tell me what each "
    "of the towns might live on, who works there, and what the river means to the people of the last one.",
    "Explain to somebody who has never programmed what a sorting algorithm is. Use a pile of library cards as your "
    "example, compare two ways of doing it, and say which one you would choose for ten cards and for ten thousand.",
    "Write a letter from a lighthouse keeper to his sister in the city. He describes one week of storms, a ship that "
    "nearly ran aground, and why he does not want to leave even though the lamp will be automated next spring.",
    "List the steps of baking a plain loaf of bread with flour, water, salt and yeast. Give amounts and times, say how "
    "the dough should feel at each step, and what went wrong when the crumb is dense or the crust is pale.",
    "What happens in a computer between the moment a key is pressed and the moment the letter is on the screen? Go "
    "through keyboard, operating system, program and display one after the other, and do not leave out the waiting.",
    "Two friends argue whether a small town should build a swimming pool or repair its old bridge. Write their talk, "
    "let each of them have good reasons, and let them find something at the end that neither had thought of before.",
    "Describe the night sky over a desert to a child who lives in a bright city. Which things are planets, which are "
    "stars, why do some of them twinkle, and how did travellers find their way by them before there were maps?",
    "A factory makes 480 chairs a day with 12 workers. One morning three of them are ill, and an order of 700 chairs "
    "is due tomorrow evening. Work out what the foreman can do, compute each option, and recommend one of them.",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one copy did against the exact one, over all prompts."""

    copy: str
    tokens: int
    agreement: float
    cosine_mean: float
    cosine_p01: float
    perplexity: float
    perplexity_exact: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.perplexity_exact - 1

    @property
    def ok(self) -> bool:
        return (
            self.agreement >= AGREEMENT_NEED
            and self.cosine_mean >= COSINE_MEAN_NEED
            and self.cosine_p01 >= COSINE_LOW_NEED
        )


class Copies:
    """Three KV stores of one arena: block table `[copy][prompt]`, each of `blocks` slots."""

    def __init__(self, model: LlamaModel, prompts: Sequence[Sequence[int]], steps: int, codec: Codec) -> None:
        self.prompts = prompts
        self._codec = codec
        self.blocks = -(-(max(len(tokens) for tokens in prompts) + steps) // BLOCK_SIZE)
        form = model.info.geometry
        self.geometry = BlockGeometry(
            num_layers=form.num_layers,
            num_kv_heads=form.num_kv_heads,
            head_dim=form.head_dim,
            dtype=DType.BF16,
            block_size=BLOCK_SIZE,
        )
        self.kv = BufferPagedKV.allocate(self.geometry, len(COPIES) * len(prompts) * self.blocks)
        self._cell = memoryview(bytearray(self.geometry.slot_layer_nbytes))
        self._codes = memoryview(bytearray(encoded_cell_nbytes(codec, self.geometry)))
        self._model = model

    def table(self, copy: int, prompt: int) -> list[int]:
        first = (copy * len(self.prompts) + prompt) * self.blocks
        return list(range(first, first + self.blocks))

    def prefill(self, prompt: int) -> None:
        """All of the prompt but its last token, alike in every copy; then as each copy keeps it."""
        tokens = self.prompts[prompt][:-1]
        for copy in range(len(COPIES)):
            self._model.prefill(self.kv, tokens, 0, self.table(copy, prompt), NoHooks())
        for copy in (1, 2):
            for block in range(-(-len(tokens) // BLOCK_SIZE)):
                if copy == 1 or (block + 1) * BLOCK_SIZE <= len(tokens):
                    self.through_codec(self.table(copy, prompt)[block])

    def through_codec(self, slot: int) -> None:
        for layer in range(self.geometry.num_layers):
            values = self.kv.kv(layer)[slot]
            cell = np.ascontiguousarray(values).data.cast("B")
            encode_cell(self._codec, self.geometry, cell, self._codes)
            decode_cell(self._codec, self.geometry, self._codes, self._cell)
            values[...] = np.frombuffer(self._cell, np.uint16).reshape(values.shape)


def measure(
    model: LlamaModel, prompts: Sequence[Sequence[int]], steps: int, seed: int | None, codec: Codec, *, quiet: bool
) -> list[Outcome]:
    """Run all copies of all prompts side by side, one batch a step. Without a seed the most likely token is taken."""
    copies, rng = Copies(model, prompts, steps, codec), np.random.default_rng(seed)
    for prompt in range(len(prompts)):
        copies.prefill(prompt)
    tokens = [prompt[-1] for prompt in prompts]
    agreed = np.zeros((len(COPIES), steps, len(prompts)), bool)
    cosines, surprise = np.ones(agreed.shape), np.zeros(agreed.shape)
    tables = [[copies.table(copy, prompt) for prompt in range(len(prompts))] for copy in range(len(COPIES))]
    started = time.monotonic()
    for step in range(steps):
        places = [len(prompt) - 1 + step for prompt in prompts]
        batch = [
            DecodeInput(tokens[prompt], places[prompt], table)
            for tables_of_copy in tables
            for prompt, table in enumerate(tables_of_copy)
        ]
        rows = np.stack([_logits(output) for output in model.decode(copies.kv, batch)])
        logits = rows.astype(np.float64).reshape(len(COPIES), len(prompts), -1)
        logp = logits - logits.max(axis=2, keepdims=True)
        logp -= np.log(np.exp(logp).sum(axis=2, keepdims=True))
        if seed is None:
            tokens = [int(token) for token in logits[0].argmax(axis=1)]
        else:
            tokens = [int(rng.choice(logp.shape[2], p=_normal(np.exp(row)))) for row in logp[0]]
        surprise[:, step] = -logp[:, np.arange(len(prompts)), tokens]
        agreed[:, step] = logits.argmax(axis=2) == logits[0].argmax(axis=1)
        norms = np.linalg.norm(logits, axis=2)
        cosines[:, step] = (logits * logits[0]).sum(axis=2) / (norms * norms[0])
        for prompt, place in enumerate(places):
            if (place + 1) % BLOCK_SIZE == 0:
                copies.through_codec(tables[2][prompt][place // BLOCK_SIZE])
        if not quiet and (step + 1) % 20 == 0:
            left = (time.monotonic() - started) / (step + 1) * (steps - step - 1)
            print(f"\r{step + 1}/{steps} tokens, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    if not quiet:
        print(file=sys.stderr)
    return [
        Outcome(
            copy=name,
            tokens=agreed[index].size,
            agreement=float(agreed[index].mean()),
            cosine_mean=float(cosines[index].mean()),
            cosine_p01=float(np.quantile(cosines[index], 0.01)),
            perplexity=float(np.exp(surprise[index].mean())),
            perplexity_exact=float(np.exp(surprise[0].mean())),
        )
        for index, name in enumerate(COPIES)
        if index
    ]


def _logits(output: object) -> NDArray[np.float32]:
    assert isinstance(output, Stepped)
    return output.logits


def _normal(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = weights / weights.sum()
    return scaled


def make_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown rows."""
    head = (
        "| KV | tokens | same token | logit cosine, mean | 1st percentile | perplexity | change |\n" + "|---" * 7 + "|"
    )
    rows = [
        f"| {one.copy} | {one.tokens:,} | {one.agreement:.2%} | {one.cosine_mean:.6f} | {one.cosine_p01:.5f} "
        f"| {one.perplexity:.3f} (exact {one.perplexity_exact:.3f}) | {one.perplexity_change:+.2%} |"
        for one in outcomes
    ]
    return "\n".join([head, *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="100 tokens of each prompt instead of 1,000")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--codec", choices=("fp8_e4m3", "int8"), default="fp8_e4m3", help="(default %(default)s)")
    parser.add_argument("--draw", choices=("greedy", "sampled"), default="greedy", help="which tokens are forced")
    parser.add_argument("--seed", type=int, default=1, help="of sampled tokens (default %(default)s)")
    chosen = parser.parse_args()
    weights = open_weights()
    model, text = LlamaModel(weights), BpeTokenizer(weights.tokenizer_json, weights.text)
    prompts = [text.encode_chat([ChatMessage("user", prompt)]) for prompt in PROMPTS]
    steps = 100 if chosen.quick else chosen.tokens
    seed = chosen.seed if chosen.draw == "sampled" else None
    outcomes = measure(model, prompts, steps, seed, Codec(chosen.codec), quiet=chosen.json)
    if chosen.json:
        print(
            json.dumps(
                {
                    "benchmark": "fp8_accuracy",
                    "codec": chosen.codec,
                    "draw": chosen.draw,
                    "cases": [{**asdict(one), "ok": one.ok} for one in outcomes],
                }
            )
        )
    else:
        print(make_table(outcomes))
    return 0 if outcomes[0].ok else 1


if __name__ == "__main__":
    sys.exit(main())
