"""Ends a rank together with the process that started it, from the rank's first moment on.

The parent keeps one end of a pipe and passes the other to the rank. When the parent ends, for any reason, the system
closes its end, and the rank detects it. On Linux the rank also asks for a signal, which works even if its threads
hang.

This module is imported before slow imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from litspec.errors import InputError

NAME = "LITSPEC_LIFELINE"  # file descriptor, process id of the parent, whether its main thread is the one that starts
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUMBERS: tuple[str, ...] = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
NUMBERS += ("MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODEID")
LOST = 2  # the exit code of a rank that has lost another


def describe(descriptor: int) -> str:
    """The value of the environment variable `NAME` for a new process."""
    # The signal comes when the thread that started the process ends, so only a main thread uses it.
    return f"{descriptor}:{os.getpid()}:{int(threading.current_thread() is threading.main_thread())}"


def hold() -> None:
    """Ties this process to the one that started it as a rank, if one did."""
    given = os.environ.pop(NAME, None)  # must not reach this process's own children
    if given is None:
        return
    descriptor, parent, signalled = (int(part) for part in given.split(":"))
    if signalled and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(LOST)
    threading.Thread(target=_wait, args=(descriptor,), daemon=True, name="litspec-lifeline").start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        return
    os.write(2, b"litspec: The process that started this rank has ended, so it ends too.\n")
    os._exit(LOST)


def env_int(name: str, default: int | None = None) -> int:
    """A whole number from the environment.

    Raises:
        InputError: The value is not a whole number, or it is missing and there is no default.
    """
    given = os.environ.get(name)
    if given is None and default is not None:
        return default
    try:
        return int(given or "")
    except ValueError as error:
        what = "is not set" if given is None else f"is {given!r}"
        raise InputError(
            f"{name} {what} in the environment, where a launcher leaves a whole number; start the command by the "
            "launcher, or unset its variables."
        ) from error


def check_environment() -> None:
    """Raises InputError if a rank variable is not a number. Libraries read these variables on import."""
    for name in os.environ:
        if name in NUMBERS:
            env_int(name)
