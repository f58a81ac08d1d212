"""Every bound of the engine and its reason."""

from typing import Final

from kv_core.limits import MAX_STRING_BYTES

BATCH_SEQUENCES_MAX: Final = 256
"""Sequences in one decode step: more would make the step longer than a client waits for a token."""

PREFILL_CHUNK_TOKENS: Final = 512
"""Rows of one matrix product: large enough for full speed, and a cancellation waits for one chunk of one layer."""

ATTENTION_SCORES_MAX: Final = 1 << 24
"""Elements of one score matrix (64 MiB): a chunk is cut shorter when its context is long."""

STOP_TOKENS_MAX: Final = 16
"""End tokens of a model; real ones have one to four."""

TEXT_BYTES_MAX: Final = MAX_STRING_BYTES
"""UTF-8 bytes of one text, or of all messages of a chat, to tokenise: what the bus would carry."""

CHAT_MESSAGES_MAX: Final = 1024
"""Messages of one chat."""

TOP_LOGPROBS_MAX: Final = 20
"""Alternatives reported for a token, as in the API we speak."""

VOCAB_MAX: Final = 1 << 20
"""Tokens of a vocabulary; the largest public ones have a quarter of it."""

GGUF_TENSORS_MAX: Final = 16_384
"""Tensors of a weights file: 126 layers of 9 are the largest Llama."""

CACHE_LOCK_TIMEOUT_NS: Final = 600 * 10**9
"""How long a process waits for another that unpacks the same weights: a large model from a slow disk."""

SINGLE_ROWS_MAX: Final = 4
"""Rows up to which a matrix is applied row by row; see `llama_math.linear`."""

ATTENTION_TILE_ROWS: Final = 128
"""Query rows of one score matrix: long enough for a fast product, short enough to skip the keys that come later."""
