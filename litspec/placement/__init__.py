"""Where the weights live, by Lightning Fabric. The decode loop never asks."""

from litspec.placement.single import Single, place_single

__all__ = ["Single", "place_single"]
