"""The naive side: what people do first to take a prompt from one process to another. Two processes, run by path.

    python bench/claim_cases/naive.py prefill|decode SETTINGS

It computes with the same engine, element type, block size and number of threads as the cluster, in batches as large,
and its decode process works as the cluster's does: a sequence joins the batch as soon as it is here. But

* every prompt is computed whole: nothing is shared, not even between requests that begin alike;
* when all layers are computed, the whole cache is put into one piece of memory and sent as one message;
* the prefill process waits until the decode process has it in place before it takes the next prompt;
* the decode process receives the whole message, copies it into its own blocks, and only then decodes.

It is not slowed down: no pauses, no delays of small packets, one copy of the KV at either end, a buffer that is used
again, receiving in a thread of its own beside decoding. Nothing is encrypted, checked, retried or accounted for.
"""

import queue
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.claim_cases.naive_wire import (
    HEAD_LENGTH,
    IN_PLACE,
    Ask,
    Counts,
    Ended,
    Head,
    Line,
    Settings,
    Token,
    fill,
    reach,
    taken,
)
from kv_core.dtypes import parse_dtype
from kv_services.engine.interface import ChatMessage, DecodeInput, Model, NoHooks, SamplingParams, Stepped, Tokenizer
from kv_services.engine.load import EngineSpec, open_model, open_text
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.sampling import sample
from kv_services.engine.threads import set_blas_threads

_GREEDY = SamplingParams(temperature=0.0, top_logprobs=0)


def opened(settings: Settings) -> tuple[Model, Tokenizer, BufferPagedKV]:
    """The engine, on one thread, and its memory."""
    set_blas_threads(1)
    spec = EngineSpec(kind="stub" if settings.engine == "stub" else "llama")
    model = open_model(spec)
    geometry = model.info.geometry.block_geometry(parse_dtype(settings.kv_dtype), settings.block_size)
    return model, open_text(spec)[1], BufferPagedKV.allocate(geometry, settings.slots)


def prefill(settings: Settings) -> None:
    """Compute one prompt after the other, and send each when it is computed."""
    model, tokenizer, kv = opened(settings)
    decode = reach(settings.far, settings.kv_port)
    asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
    client = taken(settings.near, settings.ask_port)
    threading.Thread(target=_read_asks, args=(client, asked), daemon=True).start()
    while (ask := asked.get()) is not None:
        tokens = tokenizer.encode_chat([ChatMessage(role, text) for role, text in ask.chat])
        # The last token of a prompt is computed by the step that gives the first of the answer, as in the cluster.
        num_blocks = -(-(len(tokens) - 1) // settings.block_size)
        model.prefill(kv, np.asarray(tokens[:-1], dtype=np.uint32), 0, range(num_blocks), NoHooks())
        computed_ns = time.monotonic_ns()
        body = np.stack([kv.kv(layer)[:num_blocks] for layer in range(kv.geometry.num_layers)])
        head = msgspec.msgpack.encode(Head(ask.number, tokens, ask.max_tokens, num_blocks, body.nbytes, computed_ns))
        decode.sendall(len(head).to_bytes(HEAD_LENGTH, "big") + head)
        decode.sendall(body.data.cast("B"))
        if decode.recv(1) != IN_PLACE:
            raise EOFError("the decode process is gone")


def _read_asks(client: socket.socket, asked: "queue.SimpleQueue[Ask | None]") -> None:
    decoder = msgspec.json.Decoder(Ask)
    with client.makefile("rb") as lines:
        for line in lines:
            asked.put(decoder.decode(line))
    asked.put(None)


@dataclass(slots=True)
class _Sequence:
    head: Head
    tokens: list[int]
    slots: list[int]
    in_place_ns: int
    made: int = 0


class Decoder:
    """The decode process: a thread that receives, one that answers how much is held, and the one that decodes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model, self._tokenizer, self._kv = opened(settings)
        self._eos = set(self._model.info.eos_ids)
        self._free = list(range(settings.slots - 1, -1, -1))
        self._room = threading.Condition()
        self._live = 0
        self._arrived: queue.SimpleQueue[_Sequence] = queue.SimpleQueue()
        self._said = threading.Lock()
        self._client: socket.socket | None = None

    def run(self) -> None:
        """Decode until the process is ended."""
        threading.Thread(target=self._receive, daemon=True).start()
        self._client = taken(self._settings.far, self._settings.token_port)
        threading.Thread(target=self._tell_counts, args=(self._client,), daemon=True).start()
        batch: list[_Sequence] = []
        while True:
            if not batch:
                batch.append(self._arrived.get())
            while len(batch) < self._settings.max_batch and not self._arrived.empty():
                batch.append(self._arrived.get())
            batch = self._step(batch)

    def _receive(self) -> None:
        sock, buffer = taken(self._settings.far, self._settings.kv_port), bytearray()
        length = memoryview(bytearray(HEAD_LENGTH))
        element = self._kv.kv(0).dtype
        while True:
            fill(sock, length)
            raw = memoryview(bytearray(int.from_bytes(length, "big")))
            fill(sock, raw)
            head = msgspec.msgpack.decode(raw, type=Head)
            if len(buffer) < head.nbytes:
                buffer = bytearray(head.nbytes)
            body = memoryview(buffer)[: head.nbytes]
            fill(sock, body)
            slots = self._take(head.num_blocks)
            layers = np.frombuffer(body, dtype=element).reshape(
                self._kv.geometry.num_layers, head.num_blocks, *self._kv.kv(0).shape[1:]
            )
            for layer, values in enumerate(layers):
                self._kv.kv(layer)[slots] = values
            in_place_ns = time.monotonic_ns()
            sock.sendall(IN_PLACE)
            self._arrived.put(_Sequence(head, list(head.tokens), slots, in_place_ns))

    def _take(self, count: int) -> list[int]:
        """Slots of a new sequence, when there are so many."""
        with self._room:
            self._room.wait_for(lambda: len(self._free) >= count)
            self._live += 1
            return [self._free.pop() for _ in range(count)]

    def _step(self, batch: list[_Sequence]) -> list[_Sequence]:
        """One token more for each; those that go on."""
        for seq in batch:
            if len(seq.tokens) > len(seq.slots) * self._settings.block_size:
                with self._room:
                    seq.slots.append(self._free.pop())
        given = [DecodeInput(seq.tokens[-1], len(seq.tokens) - 1, seq.slots) for seq in batch]
        going: list[_Sequence] = []
        for seq, output in zip(batch, self._model.decode(self._kv, given), strict=True):
            if not isinstance(output, Stepped):
                raise RuntimeError(f"request {seq.head.number}: {output}")
            token = sample(output.logits, _GREEDY, len(seq.tokens)).token
            seq.tokens.append(token)
            seq.made += 1
            if token not in self._eos:
                self._say(Token(seq.head.number, self._tokenizer.token_bytes(token)))
            if token in self._eos or seq.made == seq.head.max_tokens:
                self._end(seq)
            else:
                going.append(seq)
        return going

    def _end(self, seq: _Sequence) -> None:
        with self._room:
            self._free += seq.slots
            self._live -= 1
            self._room.notify()
        self._say(Ended(seq.head.number, seq.head.nbytes, seq.head.computed_ns, seq.in_place_ns))

    def _tell_counts(self, client: socket.socket) -> None:
        with client.makefile("rb") as lines:
            for _ in lines:
                with self._room:
                    counts = Counts(self._live, self._settings.slots - len(self._free))
                self._say(counts)

    def _say(self, line: Line) -> None:
        assert self._client is not None, line
        with self._said:
            self._client.sendall(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[2], type=Settings)
    if sys.argv[1] == "prefill":
        prefill(given)
    else:
        Decoder(given).run()
