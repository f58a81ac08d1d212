"""NIXL between two processes, driven by JSON lines; runs in NIXL's own environment (see `install.py`).

    python nixl_peer.py default | tcp | default-polled | tcp-polled

`default` is what it chooses on one host; `tcp` forbids everything else and sets its segments to 256 KiB, which is
faster there than what it comes with. NIXL's agents come with a progress thread that spins. The initiator here polls by
itself, as NIXL's users do, so with few cores its thread takes time from the transfer: `-polled` leaves that one out.
Memory is private and anonymous, every page touched before.
"""

import base64
import ctypes
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import Any, Final

NBYTES: Final = 128 << 20
PR_SET_PDEATHSIG: Final = 1
TCP: Final = {"UCX_TLS": "tcp,self", "UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped, which is most of the time
    mode, role = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "initiator"
    if role == "initiator":
        if mode.startswith("tcp"):
            os.environ.update(TCP)
        initiate(mode)
    else:
        wait_as_target()


def agent_with_memory(name: str, *, progress_thread: bool) -> tuple[Any, int, mmap.mmap]:
    api = importlib.import_module("nixl_cu12._api")
    numpy = importlib.import_module("numpy")
    memory = mmap.mmap(-1, NBYTES)
    array = numpy.frombuffer(memory, numpy.uint8)
    array[:] = 7
    address = int(array.ctypes.data)
    config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=progress_thread)
    agent = api.nixl_agent(name, config)
    agent.register_memory([(address, NBYTES, 0, "")], "DRAM")
    return agent, address, memory


def wait_as_target() -> None:
    agent, address, _memory = agent_with_memory("target", progress_thread=True)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": address}), flush=True)
    sys.stdin.read()


def initiate(mode: str) -> None:
    numpy = importlib.import_module("numpy")
    target = subprocess.Popen(
        [sys.executable, __file__, mode, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert target.stdout is not None and target.stdin is not None
    try:
        agent, address, _memory = agent_with_memory("initiator", progress_thread=not mode.endswith("-polled"))
        line = target.stdout.readline()
        while not line.startswith("{"):
            line = target.stdout.readline()
        theirs = json.loads(line)
        name = agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
        print("{}", flush=True)
        prepared: dict[str, Any] = {}
        for line in sys.stdin:
            order = json.loads(line)
            key = f"{order['op']} {order['piece']} {len(order['pairs'])}"
            if key not in prepared:
                pairs = numpy.array(order["pairs"], numpy.uint64)
                size = numpy.full(len(pairs), order["piece"], numpy.uint64)
                device = numpy.zeros(len(pairs), numpy.uint64)
                lists = [
                    agent.get_xfer_descs(numpy.stack((base + pairs[:, side], size, device), axis=1), "DRAM")
                    for side, base in enumerate((numpy.uint64(address), numpy.uint64(theirs["address"])))
                ]
                prepared[key] = agent.initialize_xfer(order["op"].upper(), *lists, name, b"")
            print(json.dumps({"gbps": rate(agent, prepared[key], order)}), flush=True)
    finally:
        target.stdin.close()
        target.wait(10)


def rate(agent: Any, handle: Any, order: dict[str, Any]) -> float:
    """GB/s; waits by polling, as its users do."""
    moved, started = 0, time.perf_counter()
    while True:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        moved += order["piece"] * len(order["pairs"])
        elapsed = time.perf_counter() - started
        if elapsed >= order["seconds"]:
            return float(moved / elapsed / 1e9)


if __name__ == "__main__":
    main()
