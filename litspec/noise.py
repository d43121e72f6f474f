"""Counter-based random numbers: a function of seed, position, and purpose or token id."""

from __future__ import annotations

from typing import Any

import torch

MASK = 0xFFFFFFFF


def lowbias32(x: Any) -> Any:
    """The lowbias32 integer hash of 32-bit numbers: an int, or an int64 tensor (overflow keeps the low bits)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def seed_words(seed: int) -> tuple[int, int]:
    """The lowest 64 bits of a seed as two 32-bit numbers, the low one first."""
    return seed & MASK, seed >> 32 & MASK


def position_keys(seed: int | tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """Two keys for each position.

    Args:
        seed: An int (its lowest 64 bits are used), or the `seed_words` of one seed per position, each (R,) int64.
        positions: (R,) int64.

    Returns:
        (R, 2) int64, 32 bits each.
    """
    # The seed is hashed before it is combined with a position, so that seeds 0 and 1 do not share noise at neighbouring
    # positions. There are two keys per position: with one key of 32 bits, two positions of a long text could have the
    # same noise, shifted by a few ids. The constants are needed because the hash maps 0 to 0.
    low, high = seed_words(seed) if isinstance(seed, int) else seed
    key = lowbias32(positions ^ lowbias32(lowbias32(low ^ 0x9E3779B9) ^ high))
    return torch.stack((key, lowbias32(lowbias32(key ^ 0x85EBCA6B) ^ low)), -1)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from counters.

    Args:
        keys: (..., R, 2) int64, see `position_keys`.
        ids: Token ids, int64, of a shape that broadcasts to (..., R, K).

    Returns:
        (..., R, K) float32; the same number for the same seed, position and id, independent of the place in a block.
    """
    bits = lowbias32(lowbias32(ids ^ keys[..., :1]) ^ keys[..., 1:])
    # In (0, 1): rounding to float32 could give 1, and log1p(-v) needs v < 1.
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def uniform_noise(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Uniform numbers from counters.

    Args:
        keys: (R, 2) int64, see `position_keys`.
        count: Numbers per position, each for a separate purpose.

    Returns:
        (R, count) float32 in [0, 1 - 2^-23], so that the product with a sum stays below the sum after rounding.
    """
    # No token has such an id, so these numbers are independent of the Gumbel noise with the same seed.
    purposes = torch.arange(count, device=keys.device) | 0x80000000
    bits = lowbias32(lowbias32(purposes ^ keys[:, :1]) ^ keys[:, 1:])
    return (bits.float() * 2.0**-32).clamp(max=1 - 2.0**-23)
