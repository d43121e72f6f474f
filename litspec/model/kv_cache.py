"""Keys and values of one text, and what all layers of one forward share.

Notation, used in the whole package `litspec.model`:

    B  sequences in a batch            S  slots of a K/V buffer
    W  rows (tokens) of one forward    L  slots read by this forward (`kv_length`, a bucket)
    H  query heads of one layer        n  rotated elements of a head (the first n of D)
    G  query groups (K/V heads)        C  width of the residual stream (`n_embd`)
    R  H / G, query heads per group    V  padded vocabulary
    D  head size                       N  B * W, the rows of all sequences, one after the other
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# What attention masks differ in: the window (None: no window), and how many copies of the rows stand below each other.
MaskKind = tuple[int | None, int]


# A compiled graph costs more to build than the few slots it could save in a short text.
SMALLEST_COMPILED = 256


def kv_bucket(length: int, *, powers_of_two: bool = False) -> int:
    """The number of K/V slots read to cover `length` positions: 64, 128, 256, 512, then multiples of 512.

    The CPU's fused attention works through the keys 512 at a time. A longer bucket then adds whole masked chunks and
    changes no bit of the result, while a length that cuts a chunk elsewhere does.

    Args:
        length: positions to cover.
        powers_of_two: double from 64 on throughout, so that few lengths (compiled graphs) cover any context.
    """
    bucket = 64
    while bucket < length and (powers_of_two or bucket < 512):
        bucket *= 2
    return bucket if bucket >= length else -(-length // 512) * 512


class KVCache:
    """Keys and values of one session. The model owns none, so that one model serves any number of texts at once.

    Every position has its own slot, also in layers with a sliding window: there the window is a mask. A ring of the
    window's size would let the rows of a refused draft overwrite keys that are still in sight.

    Attributes:
        k: one buffer per layer, `(B, G, S, D)`. Zeroed at birth: a masked slot may hold any number, but not NaN.
        v: the same for the values.
        rope: per rope base a table `(S, 2, n)` of cosines, and of sines whose first half is negated; shared with the
            model's other caches.
        max_seq_length: committed positions there is room for; the overhang of the last block comes on top.
        powers_of_two: whether buckets double throughout (see `kv_bucket`).
    """

    def __init__(
        self, k: list[Tensor], v: list[Tensor], rope: list[Tensor], max_seq_length: int, powers_of_two: bool = False
    ) -> None:
        self.k, self.v = k, v
        self.rope = rope
        self.max_seq_length = max_seq_length
        self.powers_of_two = powers_of_two
        self.slots = torch.arange(self.size, device=rope[0].device)
        self._in_sight, self._hidden = torch.tensor([0.0, -torch.inf], dtype=k[0].dtype, device=rope[0].device)

    @property
    def size(self) -> int:
        """Slots per sequence, S."""
        return self.k[0].size(2)

    def bucket(self, length: int) -> int:
        """The `kv_length` that covers `length` positions of this cache."""
        if self.powers_of_two:
            length = max(length, SMALLEST_COMPILED)
        return min(kv_bucket(length, powers_of_two=self.powers_of_two), self.size)

    def buckets(self, length: int) -> list[int]:
        """Every `kv_length` that a text which grows to `length` positions will read, in order."""
        found = [self.bucket(1)]
        while found[-1] < min(length, self.size):
            found.append(self.bucket(found[-1] + 1))
        return found

    def tensors(self) -> list[Tensor]:
        """All that a forward reads or writes here."""
        return [*self.k, *self.v, *self.rope, self.slots, self._in_sight, self._hidden]

    def mask(self, positions: Tensor, kv_length: int, window: int | None, copies: int) -> Tensor:
        """What the rows at `positions` `(B, W)` see: 0 or -inf, `(B, 1, copies * W, kv_length)`."""
        B, W = positions.shape
        slots, rows = self.slots[:kv_length], positions.view(B, 1, W, 1)
        hidden = slots > rows
        if window is not None and window < kv_length:
            hidden = hidden | (slots <= rows - window)
        mask = torch.where(hidden, self._hidden, self._in_sight)
        if copies == 1 or W == 1:
            return mask
        return mask.unsqueeze(2).expand(B, 1, copies, W, kv_length).reshape(B, 1, copies * W, kv_length)


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share.

    Attributes:
        batch_size, width: B and W.
        kv_length: slots read, L.
        positions: where the rows stand, `(N,)`.
        rope: per rope base the rows' `(cos, sin)`, each `(N, 1, n)`.
        masks: for each kind the additive mask `(B, 1, copies * W, L)`; of a single row one copy serves for all.
        exact: whether a row must keep its bits wherever it stands, as in a block to verify. Chunks of a prompt are
            always cut the same way and need no such care.
    """

    batch_size: int
    width: int
    kv_length: int
    positions: Tensor
    rope: tuple[tuple[Tensor, Tensor], ...]
    masks: dict[MaskKind, Tensor]
    exact: bool

    @classmethod
    def at(
        cls,
        cache: KVCache,
        input_pos: Tensor,
        width: int,
        kv_length: int,
        kinds: Collection[MaskKind],
        *,
        exact: bool,
    ) -> Step:
        """The step of `width` rows from `input_pos` `(B,)` on, reading `kv_length` slots."""
        positions = input_pos.unsqueeze(1) + cache.slots[:width]
        flat = positions.flatten()
        rope = tuple(table.index_select(0, flat).split(1, dim=1) for table in cache.rope)
        return cls(
            input_pos.size(0),
            width,
            kv_length,
            flat,
            rope,
            {(window, copies): cache.mask(positions, kv_length, window, copies) for window, copies in kinds},
            exact,
        )

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Put `new` `(N, G, D)` into `buffer` `(B, G, S, D)` at this step's positions.

        Into the whole buffer, never a view of it: of that, a compiled graph would make a copy in each step.
        """
        if self.batch_size == 1:
            buffer.index_copy_(2, self.positions, new.transpose(0, 1).unsqueeze(0))
        else:
            new = new.unflatten(0, (self.batch_size, self.width)).transpose(1, 2)
            buffer.scatter_(2, self.positions.view(self.batch_size, 1, -1, 1).expand_as(new), new)

    def to(self, device: torch.device) -> Step:
        """The same step for layers on another device."""
        return replace(
            self,
            positions=self.positions.to(device),
            rope=tuple((cos.to(device), sin.to(device)) for cos, sin in self.rope),
            masks={kind: mask.to(device) for kind, mask in self.masks.items()},
        )
