"""Every bound that more than one package shares, each with its reason.

A size that arrives from outside is compared with one of these before memory is taken for it. A package's own bounds
live in its own `limits.py`.
"""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

MAX_TOKENS_PER_REQUEST: Final = 1 << 20
"""Longest sequence: the longest context that models are trained for today (one million tokens)."""

MAX_TOKEN_ID: Final = (1 << 32) - 1
"""Tokens are hashed and sent as uint32."""

MIN_BLOCK_SIZE: Final = 1
MAX_BLOCK_SIZE: Final = 4096
"""Tokens per block. Engines use 16 to 256; a block must stay far below a transfer's reach."""

MAX_BLOCKS_PER_MESSAGE: Final = 1 << 16
"""The longest sequence in blocks of 16 tokens; longer lists are sent in several messages."""

MAX_MESSAGE_BYTES: Final = 8 * MIB
"""One bus message: the longest sequence as uint32 (4 MiB) and its block references (24 B each, 1.5 MiB) fit with
room to spare. Decoding takes at most about 64 times that in memory (a message of nothing but empty lists)."""

MAX_STRING_BYTES: Final = 1 * MIB
"""A text field of a message; the longest is a chat prompt."""

MAX_BINARY_BYTES: Final = MAX_MESSAGE_BYTES
"""A binary field of a message; the longest is a token list."""

MAX_ARRAY_LENGTH: Final = 1 << 17
"""Elements of one list in a message: two for every block that a message may name."""

MAX_MAP_LENGTH: Final = 1 << 12
"""Entries of one map in a message. Maps carry settings and error fields; bulk goes in lists."""

MAX_NESTING_DEPTH: Final = 16
"""Lists within lists in a message. Real messages need about five."""

MAX_NAME_BYTES: Final = 255
"""A node, model, LoRA, tenant or request name in UTF-8: what a file name may have."""

MAX_MESSAGE_TYPE_BYTES: Final = 64
"""A message type's name."""

MAX_EXTRA_DIGEST_BYTES: Final = 64
"""Content digest of a picture or sound: SHA-512 is the longest in use."""

MAX_EXTRAS_PER_REQUEST: Final = 4096
"""Pictures and sounds in one request."""

MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 1 << 16
MAX_HEAD_DIM: Final = 1 << 16
"""Model dimensions: an order of magnitude above any published model, and each fits a header field."""

MAX_ERROR_FIELDS: Final = 32
MAX_ERROR_LIST: Final = 64
MAX_ERROR_TEXT: Final = 1024
MAX_ERROR_NBYTES: Final = 32 * KIB
"""An error on the wire: its fields, elements of a list, characters of a text, and all together (about). Enough to act
on; an error is not a channel for data."""

MAX_CONFIG_FILE_BYTES: Final = 1 * MIB
"""A model's config.json; real ones have a few KiB."""

MAX_SHARD_UNITS: Final = 1 << 20
"""Layers or blocks that one sharding plan places."""

MAX_UINT64: Final = (1 << 64) - 1
MAX_UINT32: Final = (1 << 32) - 1
MAX_INT64: Final = (1 << 63) - 1
MIN_INT64: Final = -(1 << 63)
