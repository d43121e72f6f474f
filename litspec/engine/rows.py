"""Which row counts give the same bits: measured with the loaded model's own layers, on their device.

A product of two rows and one of eight may sum in another order, and then a row's logits differ in the last bits. Which
row counts agree depends on the processor, the shapes, the layout of the weights and the number of threads. So it is
measured and never assumed. Kernels are chosen by shape, so random tokens and random keys show most differences that a
text would show. Rare differences are missed: in bfloat16 one row differed at 45 of 760 positions of a real text and at
none of a few random ones. Attention over one row uses different kernels (`model.attention.folded_rows`), so 1 is a
class of its own.

Row counts that agree with each other are a *class*. A forward may have any row count of the class, so a round uses the
smallest that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from litspec.errors import InputError
from litspec.model import GPT, KVCache
from litspec.model.gpt import Block

# Blocks are tried across these borders between K/V buckets. After each border, sums over keys may get longer; after
# 512 the CPU's fused attention works in several chunks.
BORDERS = (64, 128, 256, 512, 1024)
# Factor for the values in the cache, where their type can hold it; see `_Trial`.
LOUD = 2.0**22
# Row counts tried, from `most` up, if the result of a row depends on its place in the block.
MORE = 8
# On a CPU PyTorch leaves a 16-bit product to oneDNN if rows * inputs * outputs is more than this; else it uses a kernel
# of its own (ATen/native/mkldnn/Matmul.cpp). With a layer of 32 x 32, 26 of 1.3 million results of 2 rows differed from
# those of 8 rows, too few to be seen in a trial.
SMALL_PRODUCT = 16**3
# Positions of the texts in a trial batch: one in each of the first buckets, and one after the first chunk of 512.
SHORT, LONG = (4, 60, 100), (4, 60, 300, 532)


class Layers(Protocol):
    """Layers to measure, with their keys and values.

    Attributes:
        block_size: Most positions.
        vocab_size: Number of token ids.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def make_cache(self, length: int, width: int, batch_size: int) -> KVCache:
        """A cache of `batch_size` sequences, with room for a block of `width` rows after `length` positions."""
        ...

    def run(self, ids: Tensor, first: Sequence[int], cache: KVCache, logits: bool) -> list[Tensor]:
        """Results of some rows.

        Args:
            ids: `(B, n)`.
            first: Position of the first row of each sequence.
            cache: The cache of these sequences.
            logits: Whether logits are among the results.

        Returns:
            Tensors `(B * n, ...)`. Keys and values written to the cache need not be among them.
        """
        ...


class _Whole:
    """The leading blocks of a model that contain every kind of block, and the head."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.n_layer = distinct_blocks(model)
        self.block_size, self.vocab_size = model.config.block_size, model.config.vocab_size

    def make_cache(self, length: int, width: int, batch_size: int) -> KVCache:
        return self.model.make_cache(length, batch_size=batch_size, width=width, n_layer=self.n_layer)

    def run(self, ids: Tensor, first: Sequence[int], cache: KVCache, logits: bool) -> list[Tensor]:
        out, states = self.model.verify(
            ids,
            torch.tensor(first, device=cache.slots.device),
            cache,
            kv_length=cache.bucket(max(first) + ids.size(1)),
            n_layer=self.n_layer,
            last=None if logits else 0,
            taps=(self.n_layer - 1,),
        )
        return [*([out.flatten(0, 1)] if logits else []), states.flatten(0, 1)]


def distinct_blocks(model: GPT) -> int:
    """How many leading blocks of the model contain every kind of block; later blocks repeat their shapes."""
    kinds = [_kind(block) for block in model.transformer.h]
    return max(kinds.index(kind) for kind in kinds) + 1


@torch.inference_mode()
def find_rows(model: GPT, most: int, *, borders: Sequence[int] = BORDERS) -> tuple[int, ...]:
    """The row counts whose results equal those of `most` rows to the bit.

    On some machines the result of a row depends on its place in a block of `most` rows. Then the next larger row count
    without this dependence is used instead. For example, five rows do not work if products run in tiles of four rows.

    Each smaller row count is compared at both ends of the block of `most` rows: the keys and values written, the
    residual stream, and, at the first border, the logits. Costs about 2 * most * (len(borders) + 1) forwards of
    `distinct_blocks` layers, and 2 * most of the head.

    Args:
        model: Loaded and placed, with the weights in their final layout; eager. If it is sharded, all ranks call this
            with the same arguments, and use the row counts that every rank found.
        most: The most rows of a forward, at least 1.
        borders: K/V lengths across which blocks are tried; those beyond the model's context are left out.

    Returns:
        Row counts in rising order; the last is `most` or slightly more.

    Raises:
        InputError: `most` is less than 1, or the model's context is shorter than `most`.
    """
    if most < 1:
        raise InputError(f"The most rows of a forward must be at least 1, got {most}.")
    for size in (*range(most, most + MORE), most):
        trial = _Trial(_Whole(model), min(model.config.block_size, max(borders, default=0) + size + 1), size + 1)
        inside = [border for border in borders if border + size < trial.cache.max_seq_length]
        first = [0, *((border - size // 2) // 4 * 4 for border in inside)]
        # Logits are compared at the first position across a border, if there is one.
        with_logits = first[1] if len(first) > 1 else 0
        if all(trial.keeps_place(position, size, position == with_logits) for position in first):
            break
    most = size
    kernels = trial.kernels([0], most)
    found = {n for n in range(2, most) if trial.kernels([0], n) == kernels}
    for position in first:
        logits = position == with_logits
        want = trial.run([position], most, logits)
        for n in sorted(found):
            for skip in sorted({0, most - n}):
                if not trial.run([position + skip], n, logits).equals(want.part(skip, n)):
                    found.discard(n)
                    trial.run([position], most, logits)  # restores the cache
                    break
    return (*sorted(found), most)


@torch.inference_mode()
def class_limit(model: GPT | Layers, rows: Sequence[int], at_least: int) -> int:
    """The most rows in total for which a batch gives each text the same bits as the text alone.

    Totals double from `rows[-1]` until one fails or `at_least` is reached. Each is tried with the smallest, the largest
    and an odd number of rows per text. The texts are at different positions, in different K/V buckets; a batch reads
    the bucket of the longest.

    Args:
        model: As for `find_rows`, or layers of a drafter.
        rows: A class, in rising order, as `find_rows` returns it.
        at_least: The most rows that a forward will have, the texts of a batch times the rows of each.

    Returns:
        The largest total that passed; `rows[-1]` if no batch did. The search stops at the first one >= `at_least`.
    """
    layers = _Whole(model) if isinstance(model, GPT) else model
    most = rows[-1]
    odd = next((n for n in reversed(rows) if n % 2 and n not in (rows[0], most)), most)
    limit = most
    kernels = _Trial(layers, most, most).kernels([0], most)
    while limit < at_least:
        total = 2 * limit
        for n in sorted({rows[0], odd, most}):
            positions = [p for p in (LONG if n == most else SHORT) if p + n <= layers.block_size]
            trial = _Trial(layers, positions[-1] + n, most, batch_size=total // n)
            first = [positions[b % len(positions)] for b in range(total // n)]
            if trial.kernels(first, n) != kernels:
                return limit
            # The longest text comes last, so that an influence on the sequence before it would show.
            together = trial.run(first, n, logits=n == most)
            for b, position in enumerate(first[: len(positions)]):
                alone = trial.run([position], n, logits=n == most, at=b)
                if not all(together.part(at * n, n).equals(alone) for at in range(b, len(first), len(positions))):
                    return limit
        limit = total
    return limit


class _Seen(NamedTuple):
    """Results of N rows, each `(N, ...)`: logits if asked for, the residual stream, keys and values of every layer."""

    results: list[Tensor]

    def part(self, skip: int, n: int) -> _Seen:
        return _Seen([x[skip : skip + n] for x in self.results])

    def equals(self, other: _Seen) -> bool:
        return all(torch.equal(ours, theirs) for ours, theirs in zip(self.results, other.results, strict=True))


class _Trial:
    """Random texts over a cache of random keys and values.

    Attention sums in float32. Rounding the result to bf16 would hide almost every change in the order of summation. So
    of each four keys the last two repeat the first two, with large opposite values. They cancel except for the rounding
    error of the sum, which depends on its order.

    All sequences of a batch hold the same text, so that a row at a position has one right result.
    """

    def __init__(self, layers: Layers, length: int, width: int, batch_size: int = 1) -> None:
        self.layers = layers
        generator = torch.Generator().manual_seed(0)
        self.cache = layers.make_cache(length, width, batch_size)
        for buffer in self.cache.k:
            keys = torch.randn(*buffer.shape[1:], generator=generator).unflatten(1, (-1, 2, 2))
            keys[:, :, 1] = keys[:, :, 0]
            buffer.copy_(keys.flatten(1, 3).to(buffer.dtype).expand_as(buffer))
        for buffer in self.cache.v:
            loud = min(LOUD, torch.finfo(buffer.dtype).max / 16)
            values = torch.randn(*buffer.shape[1:], generator=generator).unflatten(1, (-1, 2, 2)) * loud
            values[:, :, 1] = -values[:, :, 0]
            buffer.copy_(values.flatten(1, 3).to(buffer.dtype).expand_as(buffer))
        device = self.cache.slots.device
        self.text = torch.randint(layers.vocab_size, (self.cache.size,), generator=generator).to(device)

    def keeps_place(self, position: int, n: int, logits: bool) -> bool:
        """Whether rows have equal results in two blocks of n that begin one row apart."""
        here, next_one = self.run([position], n, logits), self.run([position + 1], n, logits)
        return here.part(1, n - 1).equals(next_one.part(0, n - 1))

    def kernels(self, first: Sequence[int], n: int) -> frozenset[tuple[int, int, bool]]:
        """Inputs and outputs of each 16-bit product, and whether it is small; empty on other devices than a CPU."""
        if not self.cache.slots.is_cpu:
            return frozenset()
        with _Products() as products:
            self.run(first, n, logits=True)
        return frozenset(products.seen)

    def run(self, first: Sequence[int], n: int, logits: bool, at: int = 0) -> _Seen:
        """Runs n rows of the text from each position in `first`, in the cache's sequences from `at` on."""
        cache = self.cache.sequences(at, at + len(first))
        places = torch.tensor(first, device=cache.slots.device)[:, None] + cache.slots[:n]
        results = self.layers.run(self.text[places], first, cache, logits)
        written = []
        for buffer in (*cache.k, *cache.v):
            own = places.to(buffer.device)[:, None, :, None].expand(-1, buffer.size(1), -1, buffer.size(3))
            written.append(buffer.gather(2, own).transpose(1, 2).flatten(0, 1))
        return _Seen([*results, *written])


class _Products(TorchDispatchMode):
    """Records the 16-bit products with weights: inputs, outputs, and whether the product is small.

    Products of attention are batched, and loud values show their differences, see `_Trial`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The place of the left factor among the arguments; for `linear` the right one is transposed.
        at = {"mm": 0, "linear": 0, "addmm": 1}.get(func.overloadpacket.__name__)
        if at is not None and args[at].dtype in (torch.bfloat16, torch.float16):
            left, right = args[at : at + 2]
            inputs, outputs = right.mT.shape[-2:] if func.overloadpacket.__name__ == "linear" else right.shape[-2:]
            self.seen.add((inputs, outputs, left.numel() * outputs <= SMALL_PRODUCT))
        return func(*args, **(kwargs or {}))


def _kind(block: Block) -> tuple[object, ...]:
    """The properties that determine which kernels a block runs."""
    modules = tuple((name, type(module).__name__) for name, module in block.named_modules())
    weights = tuple((name, p.shape, p.dtype, p.layout, _strides(p)) for name, p in block.named_parameters())
    return block.attn.window, block.attn.softcap, modules, weights


def _strides(weight: Tensor) -> tuple[int, ...] | None:
    return weight.stride() if weight.layout is torch.strided else None
