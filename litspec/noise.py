"""Gumbel noise from a counter: one number for each seed, position and token id, wherever in a text it is asked for."""

from __future__ import annotations

from typing import Any

import torch

MASK = 0xFFFFFFFF


def lowbias32(x: Any) -> Any:
    """The lowbias32 integer hash of an int, or of int64 that hold 32 bits (a product wraps and keeps its low bits)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def gumbel_noise(seed: int | torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from a counter.

    Args:
        seed: Its lowest 64 bits count; a number, or (2,) int64: its lowest 32 bits, and those above.
        positions: (R,) int64.
        ids: (R, K) or (1, K) int64, token ids.

    Returns:
        (R, K) float32; the same number for the same seed, position and id, wherever in a block it is asked for.
    """
    # The seed is scrambled before a position meets it: seeds 0 and 1 must not share their noise at neighbouring
    # positions. Two keys a position, since of one key of 32 bits two positions of a long text would have the same
    # noise, shifted by a few ids. The constants keep zeros apart, which the hash leaves zero.
    low, high = seed if isinstance(seed, torch.Tensor) else (seed & MASK, seed >> 32 & MASK)
    key = lowbias32(positions ^ lowbias32(lowbias32(low ^ 0x9E3779B9) ^ high)).unsqueeze(1)
    other = lowbias32(lowbias32(key ^ 0x85EBCA6B) ^ low)
    bits = lowbias32(lowbias32(ids ^ key) ^ other)
    # In (0, 1): a float32 near 1 is coarse, and log1p(-v) wants v below 1.
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))
