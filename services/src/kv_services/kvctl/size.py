"""`kvctl size`: the arithmetic of kv_core.geometry as a table or as JSON."""

from pathlib import Path

from rich.table import Table

from kv_core.dtypes import DType
from kv_core.geometry import Attention, ModelGeometry
from kv_core.model_files import load_geometry
from kv_core.presets import preset
from kv_services.kvctl.output import console, human_bytes, print_json


def show(model: str, tokens: int, dtype: DType, attention: Attention | None, block_size: int, as_json: bool) -> None:
    """Print the figures.

    Raises:
        KVError: an unknown model, a file that cannot be read, or an attention the model cannot be turned to.
    """
    geometry = find_geometry(model)
    if attention is not None:
        geometry = geometry.with_attention(attention)
    figures = {
        "bytes_per_token_per_layer": geometry.bytes_per_token_per_layer(dtype),
        "bytes_per_token": geometry.bytes_per_token(dtype),
        "bytes_per_sequence": geometry.bytes_per_sequence(tokens, dtype),
        "bytes_per_block": geometry.bytes_per_sequence(block_size, dtype),
    }
    if as_json:
        print_json(
            {
                "model": geometry.name,
                "attention": geometry.attention.value,
                "num_layers": geometry.num_layers,
                "num_heads": geometry.num_heads,
                "num_kv_heads": geometry.num_kv_heads,
                "head_dim": geometry.head_dim,
                "dtype": dtype.value,
                "tokens": tokens,
                "block_size": block_size,
                **figures,
            }
        )
        return
    title = (
        f"{geometry.name}: {geometry.num_layers} layers, {geometry.num_heads} heads, {geometry.num_kv_heads} KV heads "
        f"of {geometry.head_dim} ({geometry.attention.value}), {dtype.value}"
    )
    out = console()
    out.print(title)
    table = Table()
    table.add_column("KV of")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    labels = ("one token, one layer", "one token", f"{tokens:,} tokens", f"a block of {block_size} tokens")
    for label, nbytes in zip(labels, figures.values(), strict=True):
        table.add_row(label, f"{nbytes:,}", human_bytes(nbytes))
    out.print(table)


def find_geometry(model: str) -> ModelGeometry:
    """The geometry of a preset, or of a model's own file.

    Raises:
        KVError: neither.
    """
    path = Path(model)
    if path.suffix in (".json", ".gguf") or path.exists():
        return load_geometry(path)
    return preset(model)
