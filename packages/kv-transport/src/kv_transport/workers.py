"""Threads that move bytes, so that the event loop never copies for longer than it takes to answer somebody."""

import queue
import threading
from collections.abc import Callable


class WorkerPool:
    """`count` threads working off one queue, in order. `close` waits for the job at hand and drops none."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` in a thread; it must not raise, and posts its own outcome."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent.

        Raises:
            BaseException: what a job raised against its promise: a bug, never to be lost.
        """
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()
        if self._failures:
            raise self._failures.pop()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                job()
            except BaseException as error:
                self._failures.append(error)
                raise
