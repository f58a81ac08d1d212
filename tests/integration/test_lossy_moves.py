"""KV that crosses in FP8 lives under its own fidelity: a real cluster, a real (tiny) model, two kinds of requests."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_bus.interface import PeerAddress
from kv_bus.ports import pick_ports
from kv_client import Client, ClientConfig, Miss
from kv_core.ids import NodeId
from kv_core.namespace import Fidelity, Namespace
from kv_services.config import ModelSection
from kv_services.engine.load import EngineSpec, open_model, open_text
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.gateway.tenancy import OPEN_TENANT, Caller, fold_salt
from tests.client.helpers_client import admit, transport
from tests.engine.helpers_engine import TinyLlama
from tests.integration.helpers_integration import BLOCK, Fabric, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FP8 = "fp8_e4m3/1"


def tiny(folder: Path, *fidelities: str) -> ModelSection:
    path = TinyLlama(kv_heads=2, head_dim=16).write(folder / "tiny.gguf")
    return ModelSection(
        id="stub",
        engine="llama",
        path=str(path),
        block_size=BLOCK,
        kv_fidelities=list(fidelities),  # type: ignore[arg-type]
    )


async def test_what_moved_lossily_is_found_under_its_own_fidelity_and_never_served_as_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where weights are unpacked
    model = tiny(tmp_path, "exact", FP8)
    one = prompt(1, 6 * BLOCK + 5)
    async with running(prefill=1, decode=1, backend="tcp", codec="fp8_e4m3", model=model) as fabric:
        lossy = await fabric.ask(one, 12, kv_fidelity=FP8, ignore_eos=True)
        assert lossy.status == 200 and lossy.cached == 0, lossy
        await fabric.settle()
        moved = await fabric.metric("decode-1", "kv_transfer_bytes_total")
        choice = (await fabric.status("prefill-1")).codecs
        assert choice == {"decode-1": "fp8_e4m3: it was asked for"}
        sent, received = [await read(fabric, node, model, one, FP8) for node in ("prefill-1", "decode-1")]
        assert 0 < np.abs(sent - received).max() < np.abs(sent).max() / 8, "what a codec leaves of it"
        for node in ("prefill-1", "decode-1"):
            with pytest.raises(Miss):
                await read(fabric, node, model, one, "exact")

        exact = await fabric.ask(one, 12, ignore_eos=True)
        assert exact.cached == 0, "a request that says nothing was given lossy KV"
        assert exact.text == reference(model, one, 12)
        await fabric.settle()
        assert await fabric.metric("decode-1", "kv_transfer_bytes_total") == 2 * moved > 0
        assert (await fabric.status("prefill-1")).codecs["decode-1"].startswith("none: ")

        for fidelity, before in ((FP8, lossy), ("exact", exact)):
            again = await fabric.ask(one, 12, kv_fidelity=fidelity, ignore_eos=True)
            assert again.cached >= 6 * BLOCK and again.text == before.text, fidelity
        # Longer ones build on blocks that moved already and on a part-filled one; those do not go through FP8 again.
        longer = (*one, *prompt(2, 40))
        for fidelity in (FP8, "exact"):
            answer = await fabric.ask(longer, 4, kv_fidelity=fidelity, ignore_eos=True)
            assert answer.status == 200 and answer.cached >= 6 * BLOCK, (fidelity, answer)
            assert fidelity == FP8 or answer.text == reference(model, longer, 4)

        refused = await fabric.ask(one, 4, kv_fidelity="int8/1")
        assert refused.status == 400 and refused.is_clear_error() and "exact, fp8_e4m3/1" in str(refused.error)
        await fabric.settle()


async def read(
    fabric: Fabric, holder: str, model: ModelSection, tokens: tuple[int, ...], fidelity: str
) -> "np.ndarray[Any, Any]":
    """The KV of the prompt's first blocks as a reader gets it from that node, in float32."""
    info = open_text(EngineSpec(model.engine, Path(model.path)))[0]
    geometry = info.geometry.block_geometry(model.dtype, model.block_size)
    namespace = Namespace(
        model.id,
        info.weights_revision,
        salt=fold_salt(Caller(OPEN_TENANT)),
        dtype=model.dtype,
        fidelity=Fidelity.parse(fidelity),
        block_size=model.block_size,
    )
    cluster, node, name = fabric.config, fabric.config.node(holder), NodeId(f"reader-{next(_READERS)}")
    admit(cluster.keys_path, cluster.allow_list_path, name)
    requests, events = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    settings = ClientConfig(
        node_id=name,
        requests=requests,
        events=events,
        keys_folder=cluster.keys_path,
        allow_list=cluster.allow_list_path,
        holder=PeerAddress(node.node_id, node.bus_endpoint, node.events_endpoint),
        geometry=geometry,
        num_slots=8,
        transport=transport(None),
        timeout_ms=30_000,
    )
    async with Client(settings) as client:
        with await client.get_blocks(namespace, tokens, 6) as blocks:
            await blocks.wait()
            bits = np.array([blocks.array(layer) for layer in range(geometry.num_layers)])
    return (bits.astype(np.uint32) << 16).view(np.float32)


_READERS = itertools.count()


def reference(model: ModelSection, tokens: tuple[int, ...], count: int) -> bytes:
    """The answer of one process whose KV never moved."""
    spec = EngineSpec(model.engine, Path(model.path))
    engine, (info, text) = open_model(spec), open_text(spec)
    kv = BufferPagedKV.allocate(info.geometry.block_geometry(model.dtype, model.block_size), 32)
    (answer,) = SingleProcess(engine, kv).generate([GenerationRequest(tokens, count, stop_ids=frozenset())])
    return b"".join(text.token_bytes(token) for token in answer.ids).decode(errors="replace").encode()
