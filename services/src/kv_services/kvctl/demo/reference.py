"""The demo's measure: the same prompts, the same engine, one process, nothing shared and nothing moved.

    python -m kv_services.kvctl.demo.reference CONFIG_FILE INPUT OUTPUT

Reads the messages from INPUT and writes one line of JSON per answer to OUTPUT as it is made. Each prompt is computed
from its first token on, alone, with an arena of the cluster's block size and element type.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kv_core.block import Layout
from kv_services.config_file import load_config
from kv_services.engine.interface import ChatMessage, SamplingParams
from kv_services.engine.load import EngineSpec, open_model, open_text
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.threads import set_blas_threads
from kv_services.launch.errors import ProcessExitedError
from kv_services.launch.leftovers import MARK
from kv_services.launch.processes import ManagedProcess

_POLL_S: Final = 0.2
_ERROR_LINES: Final = 20


class ReferenceInput(msgspec.Struct):
    """What the process is given."""

    chats: list[list[tuple[str, str]]]
    max_tokens: int
    threads: int


class ReferenceAnswer(msgspec.Struct):
    """The tokens of one answer, as the bytes each stands for, without the one that ends it."""

    tokens: list[bytes]
    logprobs: list[float]


async def run_reference(
    folder: Path,
    config_file: Path,
    chats: Sequence[Sequence[ChatMessage]],
    max_tokens: int,
    on_answer: Callable[[int], None],
) -> list[ReferenceAnswer]:
    """Answer the chats in a process of their own.

    Args:
        folder: where its input, output and log are put; also marks it as a process of the cluster there.
        on_answer: told how many answers there are, each time there is one more.

    Raises:
        ProcessExitedError: it failed; the error has its last lines.
    """
    given, made, log = (folder / f"reference.{suffix}" for suffix in ("in", "out", "log"))
    pairs = [[(message.role, message.content) for message in chat] for chat in chats]
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    given.write_bytes(msgspec.json.encode(ReferenceInput(pairs, max_tokens, threads)))
    argv = [sys.executable, "-m", "kv_services.kvctl.demo.reference", str(config_file), str(given), str(made)]
    with log.open("wb") as output:
        process = ManagedProcess(
            "the single process", argv, output=output.fileno(), threads=threads, extra_env={MARK: str(folder)}
        )
    told = 0
    ended = asyncio.ensure_future(process.wait())
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=_POLL_S)
            count = made.read_bytes().count(b"\n") if made.exists() else 0
            if count > told:
                told = count
                on_answer(told)
    finally:
        status = await process.kill()
        await ended
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_ERROR_LINES:])
        raise ProcessExitedError(node=process.name, status=status, tail=tail)
    decoder = msgspec.json.Decoder(ReferenceAnswer)
    return [decoder.decode(line) for line in made.read_bytes().splitlines()]


def main(config_file: str, given: str, made: str) -> None:
    """Answer what `given` asks, into `made`."""
    config = load_config(config_file)
    asked = msgspec.json.decode(Path(given).read_bytes(), type=ReferenceInput)
    set_blas_threads(asked.threads)
    spec = EngineSpec(
        kind=config.model.engine,
        path=Path(config.model.path) if config.model.path else None,
        max_context=config.model.max_context,
    )
    model, (_, tokenizer) = open_model(spec), open_text(spec)
    geometry = model.info.geometry.block_geometry(config.model.dtype, config.model.block_size)
    prompts = [tokenizer.encode_chat([ChatMessage(role, content) for role, content in chat]) for chat in asked.chats]
    longest = max(map(len, prompts)) + asked.max_tokens
    kv = BufferPagedKV.allocate(geometry, -(-longest // geometry.block_size), Layout(config.model.layout))
    single = SingleProcess(model, kv)
    greedy = SamplingParams(temperature=0.0, top_logprobs=0)
    with open(made, "wb", buffering=0) as output:
        for prompt in prompts:
            (answer,) = single.generate([GenerationRequest(prompt, asked.max_tokens, greedy)])
            single.forget()
            shown = answer.tokens[:-1] if answer.stopped else answer.tokens
            line = ReferenceAnswer(
                [tokenizer.token_bytes(token.token) for token in shown], [token.logprob or 0.0 for token in shown]
            )
            output.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
