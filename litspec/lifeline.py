"""A rank that another process started ends together with it, from its first moment on.

The process that starts it keeps one end of a pipe and hands it the other. The system closes the first when the process
ends, however it does, which can be read at the second. On Linux the system is asked for a signal too, which also ends
a rank whose threads do not come to run.

This module is imported before all that takes long to import.
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
    """What a new process is to find in its environment, by `NAME`."""
    # The signal comes when the thread that started the process ends, so it is of use from the main thread only.
    return f"{descriptor}:{os.getpid()}:{int(threading.current_thread() is threading.main_thread())}"


def hold() -> None:
    """Ties this process to the one that started it as a rank, if one did."""
    given = os.environ.pop(NAME, None)  # what this process starts is no rank
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
        InputError: It is none, or it is missing and there is no default.
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
    """Raises InputError for a rank that is no number: libraries read it when they are imported."""
    for name in os.environ:
        if name in NUMBERS:
            env_int(name)
