"""The client for code without a loop: no call waits for ever, whenever it is made and whatever else happens."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_client import SyncClient
from kv_client.errors import AlreadyReleased, ClientError, DeadlineExceeded, HolderLost
from tests.client.helpers_client import NAMESPACE, NUM_BLOCKS, TOKENS, Pair


def run_in_thread(client: SyncClient, ended: list[Exception]) -> threading.Thread:
    """Read from a holder that nobody runs, in another thread."""

    def read() -> None:
        try:
            client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS, timeout_ms=3_600_000)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_a_call_before_the_start_and_after_the_end_is_refused_at_once(tmp_path: Path) -> None:
    client = SyncClient(Pair(tmp_path).config())
    with pytest.raises(AlreadyReleased):
        client.lookup(NAMESPACE, TOKENS)
    with client:
        with pytest.raises(AlreadyReleased):
            client.start()
        with pytest.raises((DeadlineExceeded, HolderLost)):
            client.lookup(NAMESPACE, TOKENS, timeout_ms=200)
    with pytest.raises(AlreadyReleased):
        client.lookup(NAMESPACE, TOKENS)
    client.close()
    with pytest.raises(AlreadyReleased):
        client.start()


def test_a_client_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    client = SyncClient(Pair(tmp_path).config())
    client.close()
    assert client._loop.is_closed()


def test_a_call_of_another_thread_ends_when_the_client_is_closed(tmp_path: Path) -> None:
    ended: list[Exception] = []
    with SyncClient(Pair(tmp_path).config()) as client:
        thread = run_in_thread(client, ended)
        while client._client.num_free_slots == 6:
            time.sleep(0.001)
    thread.join(20)
    assert not thread.is_alive()
    assert len(ended) == 1 and isinstance(ended[0], ClientError), ended


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts are raised, also where whoever started the tests (a shell, in the background) had them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_gives_back_what_it_took(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with SyncClient(Pair(tmp_path).config()) as client:

        def interrupt() -> None:
            while client._client.num_free_slots == 6:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS, timeout_ms=3_600_000)
        deadline = time.monotonic() + 20
        while client._client.num_free_slots < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert client._client.num_free_slots == 6
