"""What goes wrong with sequences that several nodes hold; each error names the node to blame, for the next attempt."""

from kv_core.errors import RetryableError
from kv_services.errors import NodeError, RequestTooLargeError


class ClusterTooSmallError(RequestTooLargeError):
    """All nodes together, empty, would not hold the sequence by any plan that the cluster file allows."""

    code = 7160
    template = "{request_id} needs {need} blocks; no {mode} plan over {nodes} nodes of {total} blocks holds it"


class ClusterFullError(NodeError, RetryableError):
    """The nodes that are alive and free just now would not hold it; all that are known, empty, would."""

    code = 7164
    template = "{request_id} needs {need} blocks over several nodes; {nodes} nodes have {free} free now"


class ShardRefusedError(NodeError, RetryableError):
    """A node that was to hold a piece has no room now, or is leaving."""

    code = 7161
    template = "{request_id}: {node} does not take its piece: {cause}"


class ShardLostError(NodeError, RetryableError):
    """A node that held a piece cannot be reached, or has it no more: the sequence is computed again."""

    code = 7162
    template = "{request_id}: the piece at {node} is lost: {cause}"


class ShardOrderError(NodeError):
    """A step that would read KV that was not written, or write out of order; nothing was touched."""

    code = 7163
    template = "{request_id}: layer {layer} reaches {have} tokens, the step begins at {start}"
