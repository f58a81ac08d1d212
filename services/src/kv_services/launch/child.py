"""Run by path in a fresh process: tie this process to its parent's life, then become the program that was asked for.

    python -S child.py PARENT_PID PROGRAM [ARGUMENT ...]

The kernel sends SIGKILL when the parent dies, however it dies; the setting survives exec. Done here, after exec,
because code between fork and exec is unsafe in a parent with threads. Imports nothing of ours: it must start fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Never returns: becomes `argv[1:]`, or ends the process if the parent is already gone."""
    parent, program = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # The parent died before the setting was made, so no signal will come.
        sys.exit("the launcher is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
