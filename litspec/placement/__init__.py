"""Where the weights live, by Lightning Fabric. The decode loop never asks."""

from litspec.placement.place import Placement, place
from litspec.placement.single import Single, load_model, place_single

__all__ = ["Placement", "Single", "load_model", "place", "place_single"]
