"""The part of UCX's C interface (UCP) that one-sided transfers need, called through ctypes.

Python bindings of UCX open the library, its context and its worker (`ucx_binding`); what they lack is put, get and
remote keys. Those are called here on the same library and the same handles, so one layer serves every binding.
Structures and constants follow `ucp/api/ucp.h` of UCX 1.12 and later, which keeps its binary interface.

Every method belongs to the thread that progresses the worker. Memory handed to an operation must stay until its
request is over: nothing here keeps it alive.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Final

from kv_transport.arena_layout import IntArray
from kv_transport.backends import ucx_io
from kv_transport.backends.ucx_io import Target, UcxCalls, as_status
from kv_transport.errors import BackendUnavailable

BUSY: Final = -15
CANCELED: Final = -16
_INPROGRESS: Final = 1

_ATTR_FLAGS: Final = 1 << 4
_EP_REMOTE_ADDRESS, _EP_ERR_MODE, _EP_ERR_HANDLER = 1 << 0, 1 << 1, 1 << 2
_ERR_MODE_PEER: Final = 1
_MEM_ADDRESS, _MEM_LENGTH = 1 << 0, 1 << 1
_CLOSE_FORCE: Final = 1

_ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int)


class UcxStatusError(Exception):
    """UCX answered with an error; translated where it is known what was tried."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _ErrorHandler(ctypes.Structure):
    _fields_ = (("cb", _ErrorCallback), ("arg", c_void_p))


class _SockAddr(ctypes.Structure):
    _fields_ = (("addr", c_void_p), ("addrlen", c_uint))


class _EpParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_handler", _ErrorHandler),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", _SockAddr),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", _SockAddr),
    )


class _MemMapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    )


class _RequestParam(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class _TagRecvInfo(ctypes.Structure):
    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


_SIGNATURES: Final[dict[str, tuple[object, list[object]]]] = {
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_worker_get_efd": (c_int, [c_void_p, c_void_p]),
    "ucp_worker_arm": (c_int, [c_void_p]),
    "ucp_worker_get_address": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_ep_create": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, c_void_p]),
    "ucp_ep_flush_nbx": (c_void_p, [c_void_p, c_void_p]),
    "ucp_mem_map": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ucp_mem_unmap": (c_int, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int, [c_void_p, c_char_p, c_void_p]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_put_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p]),
    "ucp_get_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p]),
    "ucp_tag_send_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p]),
    "ucp_tag_probe_nb": (c_void_p, [c_void_p, c_uint64, c_uint64, c_int, c_void_p]),
    "ucp_tag_msg_recv_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]),
    "ucp_request_check_status": (c_int, [c_void_p]),
    "ucp_request_cancel": (None, [c_void_p, c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
    "ucs_status_string": (c_char_p, [c_int]),
}


class Ucp:
    """One context and one worker, by their handles. `Request` values are handles; None means done at once."""

    def __init__(self, context: int, worker: int) -> None:
        """Raises `BackendUnavailable` when the process has no UCX library that offers all of it."""
        try:
            library = ctypes.CDLL("libucp.so.0")  # the one that the binding has opened already
            for name, (result, arguments) in _SIGNATURES.items():
                found = getattr(library, name)
                found.restype, found.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(scheme="ucx", reason=f"no usable libucp: {error}") from error
        self._ucp = library
        self._context = c_void_p(context)
        self._worker = c_void_p(worker)
        self._plain = _RequestParam()
        self._handlers: dict[int, object] = {}
        self._calls = UcxCalls(library, worker)

    def text(self, status: int) -> str:
        """What a status means."""
        found: bytes = self._ucp.ucs_status_string(status)
        return found.decode(errors="replace")

    # The worker.

    def progress(self) -> int:
        """Advance what is under way; 0 when nothing happened."""
        return int(self._ucp.ucp_worker_progress(self._worker))

    def poll(self, tag: int, requests: Sequence[int], wanted: c_int, turns: int) -> bool:
        """Progress until there is something to do, as `ucx_io.poll` does."""
        return ucx_io.poll(self._calls, tag, requests, wanted, turns)

    def event_fd(self) -> int:
        fd = c_int()
        self._check(self._ucp.ucp_worker_get_efd(self._worker, ctypes.byref(fd)))
        return fd.value

    def arm(self) -> bool:
        """Whether one may wait on the descriptor now; else progress first."""
        status = self._ucp.ucp_worker_arm(self._worker)
        if status == BUSY:
            return False
        self._check(status)
        return True

    def address(self) -> bytes:
        """The worker's address, to be given to peers."""
        where, size = c_void_p(), c_size_t()
        self._check(self._ucp.ucp_worker_get_address(self._worker, ctypes.byref(where), ctypes.byref(size)))
        try:
            return ctypes.string_at(where.value or 0, size.value)
        finally:
            self._ucp.ucp_worker_release_address(self._worker, where)

    # Endpoints.

    def endpoint(self, address: bytes, on_error: Callable[[int], None]) -> int:
        """An endpoint with error handling; `on_error(status)` is called in the progressing thread, at most once."""

        def failed(_argument: object, _endpoint: object, status: int) -> None:
            on_error(status)

        callback = _ErrorCallback(failed)
        params = _EpParams(
            field_mask=_EP_REMOTE_ADDRESS | _EP_ERR_MODE | _EP_ERR_HANDLER,
            address=address,
            err_mode=_ERR_MODE_PEER,
            err_handler=_ErrorHandler(callback, None),
        )
        endpoint = c_void_p()
        self._check(self._ucp.ucp_ep_create(self._worker, ctypes.byref(params), ctypes.byref(endpoint)))
        handle = endpoint.value or 0
        self._handlers[handle] = callback
        return handle

    def close_endpoint(self, endpoint: int) -> int | None:
        """Close it now, whatever is under way on it; drop it with `forget_endpoint` when the request is over."""
        params = _RequestParam(op_attr_mask=_ATTR_FLAGS, flags=_CLOSE_FORCE)
        return self._request(self._ucp.ucp_ep_close_nbx(endpoint, ctypes.byref(params)))

    def forget_endpoint(self, endpoint: int) -> None:
        """Its handler cannot be called any more."""
        self._handlers.pop(endpoint, None)

    # Memory.

    def map(self, address: int, nbytes: int) -> int:
        """Register memory; the handle is for `pack_key` and `unmap`."""
        params = _MemMapParams(field_mask=_MEM_ADDRESS | _MEM_LENGTH, address=address, length=nbytes)
        memory = c_void_p()
        self._check(self._ucp.ucp_mem_map(self._context, ctypes.byref(params), ctypes.byref(memory)))
        return memory.value or 0

    def pack_key(self, memory: int) -> bytes:
        """The key that lets a peer reach registered memory."""
        where, size = c_void_p(), c_size_t()
        packed = self._ucp.ucp_rkey_pack(self._context, memory, ctypes.byref(where), ctypes.byref(size))
        self._check(packed)
        try:
            return ctypes.string_at(where.value or 0, size.value)
        finally:
            self._ucp.ucp_rkey_buffer_release(where)

    def unmap(self, memory: int) -> None:
        self._check(self._ucp.ucp_mem_unmap(self._context, memory))

    def unpack_key(self, endpoint: int, key: bytes) -> int:
        remote = c_void_p()
        self._check(self._ucp.ucp_ep_rkey_unpack(endpoint, key, ctypes.byref(remote)))
        return remote.value or 0

    def destroy_key(self, key: int) -> None:
        self._ucp.ucp_rkey_destroy(key)

    # Operations.

    def put(self, endpoint: int, local: int, nbytes: int, remote: int, key: int) -> int | None:
        return self._request(
            self._ucp.ucp_put_nbx(endpoint, local, nbytes, remote, key, ctypes.byref(self._plain)),
        )

    def put_summed(
        self, endpoint: int, memory: memoryview, cells: IntArray, remote: int, key: int
    ) -> tuple[list[int], list[int], str | None]:
        """Put cells, each piece right after it was summed, as `ucx_io.put_summed` does.

        Returns:
            The CRC-64 of each cell, the requests, and why UCX refused (then only the requests count).
        """
        target = Target(endpoint, remote, key, ctypes.addressof(self._plain))
        checks, requests, status = ucx_io.put_summed(self._calls, target, memory, cells)
        return checks, requests, self.text(status) if status else None

    def get(self, endpoint: int, local: int, nbytes: int, remote: int, key: int) -> int | None:
        return self._request(
            self._ucp.ucp_get_nbx(endpoint, local, nbytes, remote, key, ctypes.byref(self._plain)),
        )

    def flush(self, endpoint: int) -> int | None:
        """Over when everything posted before it is done at the other side."""
        return self._request(self._ucp.ucp_ep_flush_nbx(endpoint, ctypes.byref(self._plain)))

    def send(self, endpoint: int, data: "ctypes.Array[ctypes.c_char]", tag: int) -> int | None:
        return self._request(
            self._ucp.ucp_tag_send_nbx(endpoint, data, len(data), tag, ctypes.byref(self._plain)),
        )

    def probe(self, tag: int) -> tuple[int, int] | None:
        """A message with that tag: its handle and length. It is ours from then on: `receive` it."""
        info = _TagRecvInfo()
        message = self._ucp.ucp_tag_probe_nb(self._worker, tag, (1 << 64) - 1, 1, ctypes.byref(info))
        return (message, info.length) if message else None

    def receive(self, message: int, into: "ctypes.Array[ctypes.c_char]") -> int | None:
        return self._request(
            self._ucp.ucp_tag_msg_recv_nbx(self._worker, into, len(into), message, ctypes.byref(self._plain)),
        )

    def check(self, request: int) -> bool:
        """Whether it is over; frees it then. Raises `UcxStatusError` when it failed (it is freed, too)."""
        status = self._ucp.ucp_request_check_status(request)
        if status == _INPROGRESS:
            return False
        self._ucp.ucp_request_free(request)
        self._check(status)
        return True

    def cancel(self, request: int) -> None:
        """It still must be checked until it is over."""
        self._ucp.ucp_request_cancel(self._worker, request)

    def _request(self, pointer: int | None) -> int | None:
        """A status pointer: NULL is done, a small negative number an error, anything else a request."""
        self._check(as_status(pointer))
        return pointer or None

    def _check(self, status: int) -> None:
        if status < 0:
            raise UcxStatusError(status, self.text(status))


def quiet_environment() -> None:
    """UCX warns of every variable with its prefix that it does not know, and logs to stdout, which is not its own."""
    for name, value in (("UCX_WARN_UNUSED_ENV_VARS", "n"), ("UCX_LOG_FILE", "stderr")):
        os.environ.setdefault(name, value)  # noqa: TID251 - UCX reads nothing else
