"""UCX straight through the binding: an endpoint, registered memory, put and flush. It checks nothing."""

import threading
import time

import numpy as np
from numpy.typing import NDArray

from kv_transport.backends.ucp_api import Ucp
from kv_transport.backends.ucx_binding import open_binding


class StraightTarget:
    """Owns memory, and a thread that progresses its worker while puts are expected (over tcp the target must)."""

    def __init__(self, memory: NDArray[np.uint8], options: dict[str, str]) -> None:
        self._active = threading.Event()
        self._memory = memory
        self._opened = threading.Event()
        self.address = self.key = b""
        threading.Thread(target=self._run, args=(options,), daemon=True).start()
        self._opened.wait()

    def active(self, on: bool) -> None:
        (self._active.set if on else self._active.clear)()

    def _run(self, options: dict[str, str]) -> None:
        binding = open_binding(options)
        ucp = Ucp(binding.context_handle, binding.worker_handle)
        self.address = ucp.address()
        self.key = ucp.pack_key(ucp.map(self._memory.ctypes.data, len(self._memory)))
        self._opened.set()
        while True:
            self._active.wait()
            ucp.progress()


class StraightInitiator:
    """Puts our memory into the target's."""

    def __init__(self, memory: NDArray[np.uint8], options: dict[str, str], address: bytes, key: bytes, at: int) -> None:
        self._memory, self._at = memory, at
        self._binding = open_binding(options)
        self._ucp = Ucp(self._binding.context_handle, self._binding.worker_handle)
        self._mapped = self._ucp.map(memory.ctypes.data, len(memory))
        self._failed: list[int] = []
        self._endpoint = self._ucp.endpoint(address, self._failed.append)
        self._key = self._ucp.unpack_key(self._endpoint, key)

    def rate(self, pairs: list[tuple[int, int]], piece: int, seconds: float) -> float:
        """GB/s of those pieces, one put each, again and again."""
        ours, key = self._memory.ctypes.data, self._key
        moved, started = 0, time.perf_counter()
        while True:
            requests = [
                self._ucp.put(self._endpoint, ours + mine, piece, self._at + theirs, key) for mine, theirs in pairs
            ]
            requests.append(self._ucp.flush(self._endpoint))
            for request in requests:
                while request is not None and not self._ucp.check(request):
                    self._ucp.progress()
            if self._failed:
                raise RuntimeError(self._ucp.text(self._failed[0]))
            moved += piece * len(pairs)
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                return moved / elapsed / 1e9

    def close(self) -> None:
        self._ucp.destroy_key(self._key)
        self._ucp.unmap(self._mapped)
        self._binding.close()
