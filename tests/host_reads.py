"""Counts reads from the device to the host, on a CPU, where they cannot be measured otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# In inference mode `item`, `bool(tensor)` and `tolist` show under these names (`tolist` as resolve_neg); outside of it
# as _local_scalar_dense, except `tolist`, which does not show.
_READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "resolve_neg", "equal")


class HostReads(TorchDispatchMode):
    """Counts host reads of the code under it, which must run in inference mode.

    Attributes:
        seen: The operators that read, one entry per read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        # Indexing with a mask waits for the number of its elements.
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _READS or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
