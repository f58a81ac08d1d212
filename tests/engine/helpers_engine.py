"""Tiny Llamas written as real GGUF files, an oracle that computes them the slow way, and small shorthands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from kv_core.block import Layout
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_services.engine import limits
from kv_services.engine.interface import DecodeInput, FloatArray, Model, NoHooks, PagedKV, Stepped
from kv_services.engine.paged_kv import BufferPagedKV

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ã ©"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<keep>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's stand-in for each byte, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass(slots=True)
class TinyLlama:
    """What to write; the defaults make a GQA model of three layers with tied embeddings."""

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 40
    context: int = 256
    theta: float = 10_000.0
    tied: bool = True
    rope_divisors: bool = False
    seed: int = 1
    architecture: str = "llama"
    pre: str = "smollm"
    tokenizer: str = "gpt2"
    template: str | None = CHATML
    adds_bos: bool = False
    types: tuple[int, ...] = (3, 3, 3, 4)
    extra_tensor: str | None = None
    drop_tensor: str | None = None
    half: bool = False
    edit: Callable[[gguf.GGUFWriter], None] | None = None
    change: dict[str, FloatArray] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name("tiny")
        width = self.heads * self.head_dim
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(self.ffn)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(1e-5)
        tokens = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
        writer.add_tokenizer_model(self.tokenizer)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types([*self.types, *([1] * (len(tokens) - len(SPECIALS)))])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(self.adds_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)
        if self.edit is not None:
            self.edit(writer)
        for name, values in self._tensors(len(tokens), width).items():
            writer.add_tensor(name, values.astype(np.float16) if self.half and values.ndim == 2 else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self, vocab: int, width: int) -> dict[str, FloatArray]:
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> FloatArray:
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(1.5 / np.sqrt(shape[-1]))

        keys = self.kv_heads * self.head_dim
        tensors = {"token_embd.weight": rng.standard_normal((vocab, width), dtype=np.float32)}
        for layer in range(self.layers):
            name = f"blk.{layer}."
            tensors[name + "attn_norm.weight"] = 1 + normal(width)
            tensors[name + "attn_q.weight"] = normal(width, width)
            tensors[name + "attn_k.weight"] = normal(keys, width)
            tensors[name + "attn_v.weight"] = normal(keys, width)
            tensors[name + "attn_output.weight"] = normal(width, width)
            tensors[name + "ffn_norm.weight"] = 1 + normal(width)
            tensors[name + "ffn_gate.weight"] = normal(self.ffn, width)
            tensors[name + "ffn_up.weight"] = normal(self.ffn, width)
            tensors[name + "ffn_down.weight"] = normal(width, self.ffn)
        tensors["output_norm.weight"] = 1 + normal(width)
        if not self.tied:
            tensors["output.weight"] = normal(vocab, width)
        if self.rope_divisors:
            tensors["rope_freqs.weight"] = np.linspace(1, 8, self.head_dim // 2, dtype=np.float32)
        if self.extra_tensor:
            tensors[self.extra_tensor] = normal(width)
        if self.drop_tensor:
            del tensors[self.drop_tensor]
        return tensors | self.change


def slow_logits(path: Path, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Logits at every position, `(tokens, vocab)`, by the definition: one token and one head at a time, in fp64, with
    GGUF's own interleaved order of rotation, and no cache."""
    reader = gguf.GGUFReader(path)
    get = {t.name: np.asarray(t.data, dtype=np.float64).reshape(tuple(t.shape)[::-1]) for t in reader.tensors}
    meta = {name: contents for name in reader.fields if (contents := reader.fields[name].contents()) is not None}
    heads, kv_heads = int(meta["llama.attention.head_count"]), int(meta["llama.attention.head_count_kv"])
    width, theta = int(meta["llama.embedding_length"]), float(meta["llama.rope.freq_base"])
    dim, eps = width // heads, float(meta["llama.attention.layer_norm_rms_epsilon"])
    divisors = get.get("rope_freqs.weight", np.ones(dim // 2))

    def norm(x: NDArray[np.float64], gain: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(x / np.sqrt((x * x).mean() + eps) * gain, dtype=np.float64)

    def rotated(vector: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        out = vector.copy()
        for pair in range(dim // 2):
            angle = position * theta ** (-2 * pair / dim) / divisors[pair]
            a, b = vector[2 * pair], vector[2 * pair + 1]
            out[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
            out[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    states = [get["token_embd.weight"][token] for token in tokens]
    for layer in range(int(meta["llama.block_count"])):
        w = {name.removeprefix(f"blk.{layer}."): m for name, m in get.items() if name.startswith(f"blk.{layer}.")}
        normed = [norm(x, w["attn_norm.weight"]) for x in states]
        keys = [
            [rotated((w["attn_k.weight"] @ x)[h * dim : (h + 1) * dim], i) for h in range(kv_heads)]
            for i, x in enumerate(normed)
        ]
        values = [[(w["attn_v.weight"] @ x)[h * dim : (h + 1) * dim] for h in range(kv_heads)] for x in normed]
        after = []
        for i, x in enumerate(normed):
            mixed = []
            for head in range(heads):
                query = rotated((w["attn_q.weight"] @ x)[head * dim : (head + 1) * dim], i)
                shared = head // (heads // kv_heads)
                scores = np.array([query @ keys[j][shared] for j in range(i + 1)]) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(sum(weights[j] * values[j][shared] for j in range(i + 1)))
            y = states[i] + w["attn_output.weight"] @ np.concatenate(mixed)
            z = norm(y, w["ffn_norm.weight"])
            gate, up = w["ffn_gate.weight"] @ z, w["ffn_up.weight"] @ z
            after.append(y + w["ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        states = after
    output = get.get("output.weight", get["token_embd.weight"])
    return np.stack([output @ norm(x, get["output_norm.weight"]) for x in states])


def arena(
    model: Model,
    num_slots: int = 64,
    block_size: int = 4,
    dtype: DType = DType.FP32,
    layout: Layout = Layout.LAYER_FIRST,
) -> BufferPagedKV:
    """An arena for this model, filled with bytes that are wrong as KV."""
    geometry = model.info.geometry.block_geometry(dtype, block_size)
    return BufferPagedKV(bytearray(b"\x7e" * (num_slots * geometry.block_nbytes)), geometry, layout, num_slots)


def scattered(count: int, num_slots: int = 64, seed: int = 0) -> list[int]:
    """A block table whose slots do not follow each other."""
    return [int(slot) for slot in np.random.default_rng(seed).permutation(num_slots)[:count]]


def step(model: Model, kv: PagedKV, token: int, position: int, table: Sequence[int]) -> FloatArray:
    """Logits of one sequence's decode step."""
    (output,) = model.decode(kv, [DecodeInput(token, position, table)])
    assert isinstance(output, Stepped)
    return output.logits


def last_logits(model: Model, kv: PagedKV, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> FloatArray:
    """Logits after the last token; KV of `[0, start)` is there already."""
    if start < len(tokens) - 1:
        model.prefill(kv, tokens[start:-1], start, table, NoHooks())
    return step(model, kv, tokens[-1], len(tokens) - 1, table)


def greedy(
    model: Model, kv: PagedKV, tokens: Sequence[int], table: Sequence[int], count: int, start: int = 0
) -> list[int]:
    """The next `count` tokens, each the most likely one."""
    logits = last_logits(model, kv, tokens, table, start)
    answer = [int(logits.argmax())]
    while len(answer) < count:
        logits = step(model, kv, answer[-1], len(tokens) + len(answer) - 1, table)
        answer.append(int(logits.argmax()))
    return answer


def blas_rows_are_stable() -> bool:
    """Whether this BLAS gives a row the same bits at the same place of any group of `PRODUCT_ROWS` rows: asked of it
    directly, not of the engine."""
    rng, size = np.random.default_rng(0), limits.PRODUCT_ROWS
    for outputs, inputs in ((64, 32), (80, 32), (32, 40), (960, 576), (576, 1536)):
        weight, rows = (
            rng.standard_normal((outputs, inputs), np.float32),
            rng.standard_normal((240, inputs), np.float32),
        )
        whole = rows @ weight.T
        for begin in (0, size, 3 * size):
            for count in (1, 2, 5):
                part = slice(begin, begin + count * size)
                if not np.array_equal(rows[part] @ weight.T, whole[part]):
                    return False
    return True


@dataclass(slots=True)
class RecordingHooks:
    """Writes down every call; cancels when `cancel_at` chunks were asked about."""

    cancel_at: int | None = None
    calls: list[tuple[str, int, int, int]] = field(default_factory=list)
    asked: int = 0

    def layer_needed(self, layer: int) -> None:
        self.calls.append(("needed", layer, 0, 0))

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
        self.calls.append(("written", layer, first_block, end_block))

    def cancelled(self) -> bool:
        self.asked += 1
        return self.cancel_at is not None and self.asked > self.cancel_at


@dataclass(slots=True)
class Arrival:
    """Layers below `ready` are there; `error` is raised at that layer and above."""

    ready: int = 0
    error: KVError | None = None
    asked: list[int] = field(default_factory=list)

    def layer_ready(self, layer: int) -> bool:
        self.asked.append(layer)
        if self.error is not None and layer >= self.ready:
            raise self.error
        return layer < self.ready
