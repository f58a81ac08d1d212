"""What is known of a request's last attempt: where it ran, what was found, what was moved."""

from dataclasses import dataclass, field

from kv_services.gateway.completer import Timings, Usage
from kv_services.gateway.placing import NodeChoice
from kv_services.messages import DecodeReserved, PrefillDone


@dataclass(slots=True)
class Figures:
    """One attempt, for the answer's usage and timings.

    Attributes:
        coordinator: the node that decodes a sequence held in pieces; empty for one that a node holds alone.
        prefill_asked: a prefill node was asked to compute and hand over.
        retries: why each attempt before this one ended.
    """

    choice: NodeChoice | None = None
    coordinator: str = ""
    reserved: DecodeReserved | None = None
    prefill_asked: bool = False
    prefill: PrefillDone | None = None
    retries: list[str] = field(default_factory=list)

    @property
    def awaited(self) -> bool:
        """Whether the prefill node has not yet told what it found and moved: the last token may come before that."""
        return self.prefill_asked and self.prefill is None

    def usage(self, num_prompt: int, num_answer: int) -> Usage:
        """Token counts; of the prompt's, those whose KV was found are told apart."""
        cached = self.reserved.cached_tokens if self.reserved else 0
        if self.prefill is not None:
            cached = self.prefill.local_tokens + self.prefill.pulled_tokens
        return Usage(num_prompt, num_answer, min(cached, num_prompt))

    def timings(self) -> Timings:
        """Where it ran, and what its KV cost."""
        done, attempts = self.prefill, len(self.retries) + 1
        decode = self.choice.decode.node if self.choice else self.coordinator
        if done is None or self.choice is None or self.choice.prefill is None:
            return Timings(decode_node=decode, attempts=attempts)
        return Timings(
            decode_node=decode,
            prefill_node=self.choice.prefill.node,
            kv_bytes_moved=done.bytes_moved,
            transport=done.transport,
            handover_ns=done.handover_ns,
            attempts=attempts,
            prefill_ns=done.queued_ns + done.compute_ns,
            tail_ns=done.tail_ns,
        )
