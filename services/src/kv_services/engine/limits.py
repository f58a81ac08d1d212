"""Every bound of the engine and its reason."""

from typing import Final

from kv_core.limits import MAX_STRING_BYTES

BATCH_SEQUENCES_MAX: Final = 256
"""Sequences in one decode step: more would make the step longer than a client waits for a token."""

PREFILL_CHUNK_TOKENS: Final = 480
"""Tokens computed at once: enough rows for the full speed of a matrix product, a multiple of 48 (its rows, and most
block sizes), and a cancellation waits for one chunk of one layer."""

PRODUCT_ROWS: Final = 24
"""Rows of a matrix product come in multiples of this, each at its position modulo this; see `llama_math`. The widest
kernels of the BLAS libraries in use take 4, 8, 12 or 24 rows at a time."""

ATTENTION_SCORES_MAX: Final = 1 << 24
"""Elements of one score matrix (64 MiB), as long as one KV head's fits: heads are taken in turns beyond that."""

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

ATTENTION_TILE_ROWS: Final = 48
"""Query rows of one score matrix, at a position that is a multiple of this: long enough for a fast product, short
enough to skip most of the keys that come later."""

WEIGHT_PIECE_BYTES: Final = 512 << 10
"""A piece of a matrix that several rows are multiplied with one after the other: half of a usual second-level cache."""
