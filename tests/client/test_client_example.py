"""The package's example runs as a user would run it, against a holder in this process."""

import asyncio
import sys
from pathlib import Path

from tests.client.helpers_client import GEOMETRY, NAMESPACE, NUM_BLOCKS, TOKENS, Pair, eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "packages" / "kv-client" / "examples" / "read_a_prefix.py"


async def run_example(pair: Pair, tokens: list[int]) -> tuple[int, str, str]:
    options = {
        "keys": str(pair.keys),
        "allow-list": str(pair.allow_list),
        "name": "reader",
        "holder": "holder",
        "holder-requests": pair.address.requests,
        "holder-events": pair.address.events,
        "model": NAMESPACE.model_id,
        "weights": NAMESPACE.weights_revision,
        "tokens": ",".join(map(str, tokens)),
        "dtype": GEOMETRY.dtype.value,
        "layers": str(GEOMETRY.num_layers),
        "block-size": str(GEOMETRY.block_size),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(EXAMPLE), *words, stdout=pipe, stderr=pipe
    )
    out, err = await program.communicate()
    assert program.returncode is not None
    return program.returncode, out.decode(), err.decode()


async def test_the_example_reads_a_prefix_and_names_a_miss(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder:
        status, out, err = await run_example(pair, TOKENS)
        assert (status, err) == (0, "")
        lines = out.splitlines()
        assert [line.split(":")[0] for line in lines[:-1]] == ["layer 0", "layer 1", "layer 2"]
        assert lines[-1] == f"{NUM_BLOCKS * GEOMETRY.block_nbytes} bytes over tcp"
        await eventually(lambda: not holder.leased)
        await asyncio.sleep(1.1)  # a life of the reader is named by the second that it begins in
        status, out, err = await run_example(pair, [*TOKENS, *range(8)])
        assert (status, err) == (1, "") and out.startswith("Miss: ")
