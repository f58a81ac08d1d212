"""Which KV may be moved lossily, and what a node remembers of it."""

import pytest

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.namespace import EXACT, Fidelity
from kv_services.config import ModelSection, TransportSection
from kv_services.config_checks import check_config
from kv_services.config_errors import ConfigError
from kv_services.config_file import dump_config, parse_config
from kv_services.launch import PortReservation, local_config
from kv_services.node.exact_blocks import ExactBlocks
from kv_transport import Arena
from kv_transport.codecs import Codec, accepted_under
from tests.transport.helpers_transport import NO_RESERVE

FP8 = Fidelity("fp8_e4m3", 1)
GEOMETRY = BlockGeometry(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.BF16, block_size=4)


def test_only_what_was_computed_here_is_exact_and_only_while_it_is_there() -> None:
    with Arena.create(GEOMETRY, 4, budget=NO_RESERVE) as arena:
        blocks = ExactBlocks(arena)
        for slot in range(4):
            arena.raise_generation(slot)
        assert not blocks.all_exact([1]), "nobody said so"
        blocks.note([1, 2])
        assert blocks.all_exact([1, 2]) and blocks.all_exact([])
        assert not blocks.all_exact([1, 3])
        assert [blocks.fidelity(FP8, slots) for slots in ([1], [1, 3])] == [EXACT, FP8]
        assert blocks.fidelity(EXACT, [3]) == EXACT, "nothing lossy is ever published as exact"
        arena.raise_generation(2)
        assert blocks.fidelity(FP8, [2]) == FP8, "another content"


def test_under_exact_nothing_lossy_is_accepted_and_under_others_their_own_codec() -> None:
    assert accepted_under(EXACT) == (Codec.LZ4,)
    assert accepted_under(FP8) == (Codec.LZ4, Codec.FP8_E4M3)
    assert accepted_under(Fidelity("int8", 1)) == (Codec.LZ4, Codec.INT8)
    assert accepted_under(Fidelity("fp8_e4m3", 2)) == (Codec.LZ4,), "another version is another codec"


def section(**fields: object) -> ModelSection:
    return ModelSection(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "transport", "problem"),
    [
        (section(kv_fidelities=["fp8_e4m3/1"]), {}, "expected exact"),
        (section(kv_fidelities=["exact", "exact"]), {}, "each other one once"),
        (section(kv_fidelities=["exact", "int8/1"], kv_dtype="fp16"), {}, "kv_dtype is fp16"),
        (section(), {"codec": "fp8_e4m3", "backend": "tcp"}, "expected fp8_e4m3/1 in model.kv_fidelities"),
        (section(), {"codec": "lz4", "backend": "shm"}, "backend shm moves bytes as they are"),
        (
            section(kv_fidelities=["exact", "int8/1"]),
            {"codec": "int8", "backend": "ucx", "allow_ucx": True},
            "backend ucx moves bytes as they are",
        ),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(
    model: ModelSection, transport: dict[str, object], problem: str
) -> None:
    with PortReservation() as ports, pytest.raises(ConfigError, match=problem):
        check_config(local_config(ports, model=model, transport=TransportSection(**transport)))  # type: ignore[arg-type]


def test_a_file_says_which_fidelities_there_are_and_how_kv_is_written() -> None:
    model = section(kv_fidelities=["fp8_e4m3/1", "exact"])
    with PortReservation() as ports:
        text = dump_config(local_config(ports, model=model, transport=TransportSection(codec="fp8_e4m3")))
    config = parse_config(text)
    assert config.model.kv_fidelities == ["fp8_e4m3/1", "exact"] and config.transport.codec == "fp8_e4m3"
    with pytest.raises(ConfigError, match="kv_fidelities"):
        parse_config(text.replace('"fp8_e4m3/1"', '"fp8_e4m3/9"'))
