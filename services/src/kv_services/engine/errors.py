"""What can go wrong in the engine, each with the sentence a person needs."""

from kv_core.errors import KVError


class EngineError(KVError):
    """Base of the engine's errors."""

    code = 7300


class EngineInputError(EngineError):
    """A call that no engine could carry out: a bug of the caller, or a request that should have been refused."""

    code = 7301
    template = "{field} is {value}: {expected}"


class ContextLengthError(EngineInputError):
    """More tokens than the model's context holds."""

    code = 7302
    template = "{tokens} tokens do not fit the model's context of {limit}"


class GeometryMismatchError(EngineError):
    """The arena's blocks do not have the shape of the model's KV."""

    code = 7303
    template = "the arena has {field} {have}, the model needs {need}"


class UnsupportedStoreError(EngineError):
    """KV cannot be computed on in that element type."""

    code = 7304
    template = "KV in {dtype} cannot be computed on; the engine stores {known}"


class KVRangeError(EngineError):
    """A value does not fit the stored element type; storing it anyway would give wrong tokens."""

    code = 7305
    template = "KV of layer {layer} does not fit {dtype}: use bf16 or fp32"


class ComputeCancelledError(EngineError):
    """The caller cancelled; KV announced by `layer_written` before that is complete, the rest is undefined."""

    code = 7306
    template = "cancelled before layer {layer}, token {token}"


class KVContentError(EngineError):
    """The stub read KV that no prefill of these tokens could have written (stub engine only)."""

    code = 7307
    template = "KV of layer {layer}, token {token} is not what was written"


class WeightsMissingError(EngineError):
    """There are no weights to load."""

    code = 7310
    template = "no weights at {path}: {remedy}"


class WeightsFormatError(EngineError):
    """The file is not a GGUF we can read, or was cut short."""

    code = 7311
    template = "{path} is not a usable GGUF: {detail}"


class UnsupportedModelError(EngineError):
    """A GGUF, but of a model the engine does not compute."""

    code = 7312
    template = "{path}: {detail}"


class WeightsCacheError(EngineError):
    """The unpacked weights could not be written or read."""

    code = 7313
    template = "weights cache {path}: {detail}"


class TokenizerError(EngineError):
    """The model's tokeniser cannot do that."""

    code = 7320
    template = "{detail}"


class TextTooLongError(TokenizerError):
    """A text or chat over the limit."""

    code = 7321
    template = "{what} {size} is over the limit of {limit}"


class ChatTemplateError(TokenizerError):
    """The model has no chat template, or it refused these messages."""

    code = 7322
    template = "chat template: {detail}"


class SamplingError(EngineError):
    """Sampling parameters out of range, or logits that are no numbers."""

    code = 7330
    template = "{field} is {value}: {expected}"


class NoSlotsError(EngineError):
    """A batch of the single-process engine needs more blocks than its arena has, even with nothing kept for reuse."""

    code = 7340
    template = "{need} blocks are needed, {free} are free"
