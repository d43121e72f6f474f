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

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# A kind of attention mask: the window (None without one), the number of copies of the rows, and the number of padding
# rows behind them, which see everything.
MaskKind = tuple[int | None, int, int]


# Shorter compiled steps would not save enough to be worth the time to compile them.
SMALLEST_COMPILED = 512


def kv_bucket(length: int, *, powers_of_two: bool = False) -> int:
    """The number of K/V slots read to cover `length` positions: 64, 128, 512, then multiples of 512.

    The CPU's fused attention processes the keys in chunks of 512. A longer bucket adds whole masked chunks and changes
    no bit of the result; another length would. Up to 128 keys are summed at once, independent of what is masked behind
    them. For 256 keys this is not so on every processor.

    Args:
        length: positions to cover.
        powers_of_two: double from 512 on, so that few lengths (compiled steps) cover any context.
    """
    if length <= 128:
        return 64 if length <= 64 else 128
    if not powers_of_two:
        return -(-length // 512) * 512
    bucket = 512
    while bucket < length:
        bucket *= 2
    return bucket


class KVCache:
    """Keys and values of one session. The model holds none, so one model serves any number of texts.

    Every position has its own slot, also in layers with a sliding window, where the window is a mask. In a ring buffer
    the rows of a refused draft could overwrite keys that are still in the window.

    Attributes:
        k: one buffer per layer, `(B, G, S, D)`. Zero at first: a masked slot may hold any number except NaN.
        v: the same for the values.
        rope: per rope base a table `(S, 2, n)` of cosines, and of sines whose first half is negated; shared with the
            model's other caches.
        max_seq_length: most committed positions. The buffers have extra slots for the last block.
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

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and slots per sequence, (B, S)."""
        return self.k[0].size(0), self.k[0].size(2)

    def sequences(self, first: int, end: int) -> KVCache:
        """The sequences from `first` to before `end` as a cache of their own, which shares the buffers."""
        if (first, end) == (0, self.k[0].size(0)):
            return self
        other = copy.copy(self)
        other.k, other.v = [k[first:end] for k in self.k], [v[first:end] for v in self.v]
        return other

    def copy_from(self, other: KVCache, length: int) -> None:
        """Copies the first positions of another cache of as many sequences, for the same layers."""
        for own, theirs in zip((*self.k, *self.v), (*other.k, *other.v), strict=True):
            own[:, :, :length] = theirs[:, :, :length]

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

    def mask(self, positions: Tensor, kv_length: int, kind: MaskKind) -> Tensor:
        """What the rows at `positions` `(B, W)` see: 0 or -inf, `(B, 1, copies * W + missing, kv_length)`."""
        window, copies, missing = kind
        B, W = positions.shape
        slots, rows = self.slots[:kv_length], positions.view(B, 1, W, 1)
        hidden = slots > rows
        if window is not None and window < kv_length:
            hidden = hidden | (slots <= rows - window)
        mask = torch.where(hidden, self._hidden, self._in_sight)
        if W == 1 or (copies == 1 and not missing):
            return mask
        mask = mask.unsqueeze(2).expand(B, 1, copies, W, kv_length).reshape(B, 1, copies * W, kv_length)
        return F.pad(mask, (0, 0, 0, missing)) if missing else mask


def _sequences(positions: Tensor) -> Tensor:
    """The number of the sequence of each row of `positions` `(B, W)`, `(N,)`."""
    return torch.arange(len(positions), device=positions.device).unsqueeze(1).expand_as(positions).flatten()


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share.

    Attributes:
        batch_size, width: B and W.
        kv_length: slots read, L.
        positions: where the rows stand, `(N,)`.
        sequences: whose they are, `(N,)`; not read where there is one.
        rope: per rope base the rows' `(cos, sin)`, each `(N, 1, n)`.
        masks: for each kind the additive mask, see `KVCache.mask`; of a single row one copy serves for all.
        exact: whether a row must keep its bits wherever it stands, as in a block to verify. Chunks of a prompt are
            always cut the same way and need no such care.
    """

    batch_size: int
    width: int
    kv_length: int
    positions: Tensor
    sequences: Tensor
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
            flat if len(positions) == 1 else _sequences(positions),
            rope,
            {kind: cache.mask(positions, kv_length, kind) for kind in kinds},
            exact,
        )

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Put `new` `(N, G, D)` into `buffer` `(B, G, S, D)` at this step's positions.

        Into the whole buffer, never a view of it: of that, a compiled graph would make a copy in each step.
        """
        if self.batch_size == 1:
            buffer.index_copy_(2, self.positions, new.transpose(0, 1).unsqueeze(0))
        else:
            buffer[self.sequences, :, self.positions] = new

    def to(self, device: torch.device) -> Step:
        """The same step for layers on another device."""
        return replace(
            self,
            positions=self.positions.to(device),
            sequences=self.sequences.to(device),
            rope=tuple((cos.to(device), sin.to(device)) for cos, sin in self.rope),
            masks={kind: mask.to(device) for kind, mask in self.masks.items()},
        )
