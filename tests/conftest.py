"""Settings that all tests share."""

from __future__ import annotations

import os
import signal

import torch
from hypothesis import settings

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Background processes of a shell, and their children, ignore SIGINT, but some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run: a test that fails, fails again.
settings.register_profile("litspec", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("litspec")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads that wait for each other would only slow them all down.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
