"""What the demo shows while it runs, on standard error: a live picture on a terminal, one line per event elsewhere."""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kv_services.config import ClusterConfig
from kv_services.kvctl.demo.client import Answer
from kv_services.kvctl.demo.profile import MAX_TOKENS
from kv_services.launch.processes import ProcessState

_COLOURS: Final = {
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.STOPPING: "yellow",
    ProcessState.EXITED: "dim",
}
_SHOWN_CHARACTERS: Final = 70


@dataclass(slots=True)
class _Request:
    state: str = "waiting"
    tokens: int = 0
    text: str = field(default="", repr=False)


class Screen:
    """Told of each event; draws, or writes a line."""

    def __init__(self, config: ClusterConfig, num_requests: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._processes = {node.id: ProcessState.STARTING for node in config.nodes}
        self._requests = [_Request() for _ in range(num_requests)]
        self._headline = "starting the cluster"
        self._live = Live(console=self._console, refresh_per_second=8, transient=True, get_renderable=self._picture)
        self._drawing = self._console.is_terminal

    def __enter__(self) -> Self:
        if self._drawing:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawing:
            self._live.stop()

    def stage(self, headline: str) -> None:
        """A new part of the demo begins."""
        self._headline = headline
        self._line(headline)

    def process(self, node_id: str, state: ProcessState) -> None:
        """A process changed its state."""
        self._processes[node_id] = state
        self._line(f"  {node_id} {state.value}")

    def sent(self, number: int) -> None:
        """A request was sent."""
        self._requests[number].state = "prefill"
        self._line(f"  request {number + 1} sent")

    def token(self, number: int, text: str) -> None:
        """A token of a request came."""
        request = self._requests[number]
        request.state, request.tokens, request.text = "decode", request.tokens + 1, request.text + text

    def answered(self, number: int, answer: Answer) -> None:
        """A request was answered."""
        self._requests[number].state = "done"
        fabric = answer.fabric
        self._line(
            f"  request {number + 1} answered: {fabric.prefill_node or 'no prefill'} -> {fabric.decode_node}, "
            f"{fabric.cached_tokens} of {fabric.prompt_tokens} tokens found, {len(answer.tokens)} tokens"
        )

    def failed(self, number: int, problem: str) -> None:
        """A request failed."""
        self._requests[number].state = "failed"
        self._line(f"  {problem}")

    def _line(self, text: str) -> None:
        if not self._drawing:
            self._console.print(text, markup=False, soft_wrap=True)

    def _picture(self) -> Group:
        processes = Text("  ")
        for node_id, state in self._processes.items():
            processes.append(f"{node_id} ", style="bold")
            processes.append(f"{state.value}   ", style=_COLOURS[state])
        table = Table(box=None, padding=(0, 2))
        for number, request in enumerate(self._requests):
            if request.state != "waiting":
                bar = "━" * request.tokens + "─" * max(0, MAX_TOKENS - request.tokens)
                said = request.text[-_SHOWN_CHARACTERS:].replace("\n", " ")
                table.add_row(f"request {number + 1}", request.state, bar, Text(said, style="dim", no_wrap=True))
        return Group(Text(self._headline, style="bold"), processes, table)
