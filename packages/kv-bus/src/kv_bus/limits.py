"""Every bound of the bus, with its reason.

A queue that is full has one stated policy: it refuses (the caller gets a typed error), drops and counts, or blocks.
Which one is said beside each bound. Times are nanoseconds.
"""

from typing import Final

MS: Final = 1_000_000
S: Final = 1_000_000_000

MAILBOX_MAX: Final = 4096
"""Events from outsiders that may wait in one actor's mailbox; beyond it `post` refuses. Completions are not counted:
they are bounded by the jobs in flight."""

ACTOR_TURN_EVENTS: Final = 64
"""Events one actor handles before it gives the loop back."""

ACTOR_TURN_NS: Final = MS // 2
"""An actor gives the loop back after this long, even if events of the turn are left."""

PUMP_TURN_MESSAGES: Final = 48
"""Messages read from one socket before the loop gets its turn; between 32 and 64 keeps timers within a few ms."""

PUMP_TURN_NS: Final = MS // 2
"""A socket's turn ends after this long even if its budget of messages is left."""

PACKET_MESSAGES_MAX: Final = 64
"""Messages for one connection that may share a ZeroMQ message; a reader's turn is about as long."""

PACKET_BYTES_MAX: Final = 64 << 10
"""Bytes of messages that share a ZeroMQ message; larger ones gain nothing from company."""

COPY_BYTES_MAX: Final = 64 << 10
"""An arriving frame up to this size is copied out of libzmq's memory; a larger one is read in place."""

PEER_QUEUE_MAX: Final = 4096
"""Messages that wait for a link to one peer; beyond it the call is refused with `PeerQueueFull`."""

PEER_QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes that wait for a link to one peer; beyond it the call is refused with `PeerQueueFull`."""

REPLY_QUEUE_MAX: Final = 4096
"""Replies that wait for one slow caller; beyond it they are dropped and counted, and the caller times out."""

OPEN_REQUESTS_PER_PEER: Final = 4096
"""Requests of one peer that may be unanswered here; beyond it they are refused with `TooManyRequests`."""

HANDLER_JOBS_MAX: Final = 1024
"""Async handlers that may run at once; beyond it a request is refused with `TooManyRequests`."""

PENDING_CALLS_MAX: Final = 65_536
"""Calls of this process that may wait for a reply; beyond it a call is refused with `TooManyRequests`."""

SOCKET_HWM: Final = 8192
"""Messages libzmq itself may hold per connection. Above the bounds of our own queues, so that ours decide."""

RECEIVE_HWM: Final = 1024
"""Frames libzmq reads ahead per connection; TCP then slows the sender down. With frames of the largest size this is
8 GiB per peer, which only an admitted peer can bring about."""

EVENT_HWM: Final = 65_536
"""Events libzmq holds for one slow subscriber; beyond it they are dropped, and the subscriber sees a gap."""

PEERS_MAX: Final = 1024
"""Peers one bus knows; each costs two sockets and two monitors once it is used."""

DEFAULT_REQUEST_TIMEOUT_NS: Final = 5 * S
"""How long a call waits when its caller does not say."""

MAX_REQUEST_TIMEOUT_NS: Final = 3600 * S
"""No call may wait longer than this: a pending entry is never for ever."""

SEND_TTL_NS: Final = 5 * S
"""How long a one-way message waits for its link before it is dropped and counted."""

HELLO_TIMEOUT_NS: Final = 2 * S
"""A peer that took the connection but says nothing for this long is greeted again."""

REFUSED_RETRY_NS: Final = S // 4
"""A peer that refused our key is tried again at the first call after this long; until then calls fail at once."""

SUBSCRIBE_RETRY_NS: Final = S
"""A publisher that refused our key is tried again at this pace as long as somebody listens."""

REPLY_RETRY_NS: Final = 5 * MS
"""Pause before replies to a caller that reads slowly are tried again."""

BIND_RETRY_NS: Final = 2 * S
"""A port that our previous life has just left is tried for this long before the start fails."""

RECONNECT_FIRST_MS: Final = 20
RECONNECT_MAX_MS: Final = 250
"""Pause between connection attempts; the most that a restarted peer can wait for us."""

HEARTBEAT_INTERVAL_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 8_000
"""A connection without any sign of life for this long is closed, and its calls fail. An idle one stays: the
heartbeats themselves are a sign of life."""

HANDSHAKE_TIMEOUT_MS: Final = 5_000
"""A connection that has not authenticated by then is closed."""

CLOSE_LINGER_MS: Final = 200
"""How long a closing bus lets handed-over frames leave."""

CONNECT_TIMEOUT_MS: Final = 1_000
"""A TCP connect that meets silence is given up and tried again: the kernel asks again after 1, 3 and 7 s, so that who
was cut off would be away as long again."""

ALLOW_LIST_POLL_NS: Final = S
"""How often the allow-list file is looked at; an unknown key looks at once."""

ALLOW_LIST_BYTES_MAX: Final = 1 << 20
"""An allow-list or key file larger than this is refused unread."""

EVENT_HEAD_INTERVAL_NS: Final = S // 2
"""How often a publisher that publishes nothing repeats its last sequence, so that the loss of its last event is
noticed too."""

LAG_PROBE_INTERVAL_NS: Final = 50 * MS
"""How often the loop-lag probe measures."""

MIN_LIBZMQ: Final = (4, 3, 1)
"""Older libzmq has CVE-2019-6250: a crafted frame overwrites memory."""
