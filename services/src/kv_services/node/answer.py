"""One answer that a node decodes, wherever the KV behind it lies: its tokens, whose it is, when it is complete."""

from dataclasses import dataclass

from kv_core.ids import NodeId, RequestId
from kv_services.messages import Sampling


@dataclass(slots=True, kw_only=True)
class Answer:
    """What is known of an answer under way.

    Attributes:
        tokens: prompt, what the client had at the start, and what was decoded here.
        num_given: how many of `tokens` came with the request.
        num_confirmed: tokens of the answer that the client had at the start.
        answered: whether the gateway's reserve got its reply.
    """

    request_id: RequestId
    epoch: int
    gateway: NodeId
    tokens: list[int]
    num_given: int
    num_confirmed: int
    sampling: Sampling
    deadline_ns: int
    answered: bool = False

    @property
    def num_produced(self) -> int:
        """Tokens decoded here."""
        return len(self.tokens) - self.num_given

    @property
    def newest_index(self) -> int:
        """Index in the whole answer of the token decoded last."""
        return self.num_confirmed + self.num_produced - 1

    def finish_reason(self, token_id: int) -> str | None:
        """Why the answer is complete with this token, if it is."""
        if token_id in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_produced >= self.sampling.max_tokens else None
