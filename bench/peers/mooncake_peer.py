"""Mooncake's transfer engine over TCP between two processes, driven by JSON lines; runs in its own environment.

    python mooncake_peer.py tcp

It needs the system's libibverbs even for TCP. Memory is private and anonymous, every page touched before.
"""

import ctypes
import importlib
import json
import mmap
import signal
import subprocess
import sys
import time
from typing import Any, Final

NBYTES: Final = 128 << 20
PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped, which is most of the time
    if len(sys.argv) > 2:
        wait_as_target()
    else:
        initiate(sys.argv[1])


def engine_with_memory(protocol: str) -> tuple[Any, int, mmap.mmap]:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, ""):
        raise RuntimeError("the engine does not start")
    memory = mmap.mmap(-1, NBYTES)
    memory.write(b"\x07" * NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, NBYTES):
        raise RuntimeError("memory cannot be registered")
    return engine, address, memory


def wait_as_target() -> None:
    engine, address, _memory = engine_with_memory(sys.argv[1])
    print(json.dumps({"port": engine.get_rpc_port(), "address": address}), flush=True)
    sys.stdin.read()


def initiate(protocol: str) -> None:
    target = subprocess.Popen(
        [sys.executable, __file__, protocol, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert target.stdout is not None and target.stdin is not None
    try:
        engine, address, _memory = engine_with_memory(protocol)
        line = target.stdout.readline()
        while not line.startswith("{"):
            line = target.stdout.readline()
        theirs = json.loads(line)
        name = f"127.0.0.1:{theirs['port']}"
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps({"gbps": rate(engine, name, address, theirs["address"], json.loads(line))}), flush=True)
    finally:
        target.stdin.close()
        target.wait(10)


def rate(engine: Any, name: str, mine: int, theirs: int, order: dict[str, Any]) -> float:
    """GB/s of one batch after the other."""
    move = engine.batch_transfer_sync_read if order["op"] == "read" else engine.batch_transfer_sync_write
    ours = [mine + pair[0] for pair in order["pairs"]]
    others = [theirs + pair[1] for pair in order["pairs"]]
    sizes = [order["piece"]] * len(ours)
    moved, started = 0, time.perf_counter()
    while True:
        if move(name, ours, others, sizes):
            raise RuntimeError("the transfer failed")
        moved += sum(sizes)
        elapsed = time.perf_counter() - started
        if elapsed >= order["seconds"]:
            return float(moved / elapsed / 1e9)


if __name__ == "__main__":
    main()
