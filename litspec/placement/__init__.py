"""Placement of the weights on devices, with Lightning Fabric. The decode loop does not depend on it."""

from litspec.placement.heartbeat import LostRank
from litspec.placement.place import place, process_rank
from litspec.placement.replicate import Replica, share_of
from litspec.placement.single import Single, load_model
from litspec.placement.tensor_parallel import TensorParallel

__all__ = [
    "LostRank",
    "Replica",
    "Single",
    "TensorParallel",
    "load_model",
    "place",
    "process_rank",
    "share_of",
]
