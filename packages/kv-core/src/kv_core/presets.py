"""The geometry of well-known models, from their published configurations.

A name that is not here is an error that lists those that are; a model can always be read from its own files
(`model_files`).
"""

from typing import Final

from kv_core.errors import KVError
from kv_core.geometry import Attention, ModelGeometry, attention_of


class UnknownModelError(KVError):
    """A model name without a preset."""

    code = 1041
    template = "no preset for model {name!r}; known are {known}"


def preset(name: str) -> ModelGeometry:
    """The geometry of a well-known model.

    Raises:
        UnknownModelError: no preset of that name; the message lists the names.
    """
    try:
        return _PRESETS[name]
    except KeyError:
        raise UnknownModelError(name=name, known=", ".join(_PRESETS)) from None


def preset_names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_PRESETS)


def _plain(name: str, layers: int, heads: int, kv_heads: int, head_dim: int, max_tokens: int) -> ModelGeometry:
    return ModelGeometry(name, layers, heads, kv_heads, head_dim, attention_of(heads, kv_heads), max_tokens=max_tokens)


def _deepseek_v3(name: str) -> ModelGeometry:
    # 128 elements of a key come from the latent vector, 64 are rotary. The layer for predicting a second token, which
    # serving may leave out, is not counted.
    return ModelGeometry(
        name, 61, 128, 1, 192, Attention.MLA, v_head_dim=128, latent_dim=512, rope_dim=64, max_tokens=163840
    )


_PRESETS: Final = {
    geometry.name: geometry
    for geometry in (
        _plain("llama-2-7b", 32, 32, 32, 128, 4096),
        _plain("llama-2-13b", 40, 40, 40, 128, 4096),
        _plain("llama-2-70b", 80, 64, 8, 128, 4096),
        _plain("llama-3-8b", 32, 32, 8, 128, 8192),
        _plain("llama-3-70b", 80, 64, 8, 128, 8192),
        _plain("llama-3.1-8b", 32, 32, 8, 128, 131072),
        _plain("llama-3.1-70b", 80, 64, 8, 128, 131072),
        _plain("llama-3.1-405b", 126, 128, 8, 128, 131072),
        _plain("llama-3.2-1b", 16, 32, 8, 64, 131072),
        _plain("llama-3.2-3b", 28, 24, 8, 128, 131072),
        _plain("llama-3.3-70b", 80, 64, 8, 128, 131072),
        _plain("qwen2.5-0.5b", 24, 14, 2, 64, 32768),
        _plain("qwen2.5-1.5b", 28, 12, 2, 128, 32768),
        _plain("qwen2.5-3b", 36, 16, 2, 128, 32768),
        _plain("qwen2.5-7b", 28, 28, 4, 128, 131072),
        _plain("qwen2.5-14b", 48, 40, 8, 128, 131072),
        _plain("qwen2.5-32b", 64, 40, 8, 128, 131072),
        _plain("qwen2.5-72b", 80, 64, 8, 128, 131072),
        _plain("mistral-7b", 32, 32, 8, 128, 32768),
        _plain("mixtral-8x7b", 32, 32, 8, 128, 32768),
        _deepseek_v3("deepseek-v3"),
        _deepseek_v3("deepseek-r1"),
        _plain("smollm2-135m", 30, 9, 3, 64, 8192),
    )
}
