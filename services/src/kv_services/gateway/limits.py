"""Every bound of the HTTP front and its reason."""

from typing import Final

MAX_BODY_BYTES: Final = 4 << 20
"""A request's body: a prompt of 128 Ki tokens takes 1 MiB as text or as a token list, with room for escapes."""

BODY_TIMEOUT_S: Final = 30.0
"""For a whole body: 4 MiB at 1.2 Mbit/s."""

OFFLOAD_BYTES: Final = 1 << 10
"""Longer texts are tokenised in a thread: byte-pair encoding does about 1 KiB in a millisecond."""

OFFLOAD_JSON_BYTES: Final = 16 << 10
"""Longer bodies are read in a thread, token lists too: on the loop that many bytes take a fifth of a millisecond, and a
thread's turn costs a request as much."""

OFFLOAD_CANDIDATES: Final = 512
"""An answer with more log-probabilities is written in a thread: each takes about 2 µs."""

MAX_CONNECTIONS: Final = 4096
"""Open client connections; each may hold a read buffer of 64 KiB and a write buffer of 128 KiB."""

MAX_STOP_STRINGS: Final = 4
"""As in the API we speak."""

MAX_STOP_CHARS: Final = 256
"""One stop string: text is held back for at most this long."""

MAX_MESSAGES: Final = 1024
"""Messages of one chat, as the tokeniser allows."""

MAX_TOP_LOGPROBS_CHAT: Final = 20
MAX_TOP_LOGPROBS_COMPLETION: Final = 5
"""As in the API we speak."""

MAX_SALT_CHARS: Final = 256
"""A client's `cache_salt`; it is hashed, never stored."""

MAX_RETENTION_S: Final = 31_536_000
MAX_RETENTION_PRIORITY: Final = 100
"""A client's `kv_retention`: a year, and priorities as a pool takes them."""

MAX_USER_CHARS: Final = 128
"""A client's `user`; it goes to the log."""

MAX_ECHO_CHARS: Final = 64
"""How much of what a client sent is repeated in an error."""

DEFAULT_COMPLETION_TOKENS: Final = 16
"""`max_tokens` of /v1/completions when none is given, as in the API we speak."""

STREAM_WINDOW: Final = 256
"""Tokens that wait for a slow reader before its producer must pause."""

KEEPALIVE_S: Final = 10.0
"""Silence after which a streamed answer sends a comment: below the idle limit of common proxies (30 to 60 s)."""

STALL_TIMEOUT_S: Final = 30.0
"""How long a client may leave 128 KiB of its answer unread before its request is ended."""

FINISH_GRACE_S: Final = 1.0
"""How long an answer whose text is complete waits for its timings."""

WRITE_PIECE_BYTES: Final = 64 << 10
"""A long body is sent in pieces of this size, each under the stall limit, so that slow but steady readers get it."""

IDLE_CONNECTION_S: Final = 75.0
"""A connection without a request is closed after this."""

LINGER_S: Final = 2.0
"""How long the rest of a refused body is read, so that the client gets to see the refusal."""
