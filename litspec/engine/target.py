"""The target's side of the engine: what runs it, and the slots of its K/V cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from litspec.engine.runner import Runner
from litspec.model import GPT, KVCache

# Rows that a prompt is read in; another size would change the last bits of its keys and values.
PREFILL_CHUNK = 512


class Placed(Protocol):
    """A target whose weights have been placed on one device or many (see `litspec.placement`).

    Attributes:
        model: The model; what it returns lies on `device`, complete, on every rank.
        device: Where tokens and logits are.
        verify_width: W, the most rows of a verification.
        rows: Numbers of rows with equal bits, in rising order, of which a verification runs one; the last holds W.
        most_rows: Rows of several texts that keep these bits in one forward.
        draft_model: The model of the draft checkpoint, where there is one.
        runner: Runs the steps.
        rank: This process among those that were launched together, 0 for one alone.
        world_size: How many they are.
        is_rank_zero: Whether this process is the one that prints and writes.
    """

    model: GPT
    device: torch.device
    verify_width: int
    rows: tuple[int, ...]
    most_rows: int
    draft_model: GPT | None
    runner: Runner
    rank: int
    world_size: int

    @property
    def is_rank_zero(self) -> bool: ...

    def same(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens that the target is about to run, made the same on every rank; may change them in place."""
        ...

    def share_int(self, value: int) -> int:
        """One number for all ranks that make a text together: rank 0's."""
        ...

    def agree(self, packed: torch.Tensor, count: int, decide: Callable[[list[int]], list[int]]) -> list[int]:
        """Brings the outcome of a round to the host, the only read of the round, the same on every rank.

        Args:
            packed: (n,) int64, this rank's outcome.
            count: How many numbers `decide` returns.
            decide: Given the outcome, decides about the next round; called on one rank only.

        Returns:
            The deciding rank's outcome, and what it decided behind it.
        """
        ...


class TargetSession:
    """One text's hold on the target: a slot of a K/V cache and what stands in it.

    Attributes:
        model: The target.
        config: Its LitGPT config.
        cache: Keys and values of this text alone; positions behind the committed ones hold leftovers that nothing
            reads.
        device: Where tokens and logits are.
        rows: Numbers of rows that a verification may run.
        verify_width: W, the most of them.
        runner: Runs the steps.
        stop_ids: Single tokens that end the text, for drafters that want to cut their proposals.
    """

    def __init__(
        self, placed: Placed, max_length: int, stop_ids: Sequence[int] = (), cache: KVCache | None = None
    ) -> None:
        self.placed = placed
        self.model = placed.model
        self.config = placed.model.config
        self.device = placed.device
        self.runner = placed.runner
        self.rows = placed.runner.rows(placed.rows)
        self.verify_width = self.rows[-1]
        self.stop_ids = tuple(stop_ids)
        self.cache = cache or self.runner.make_cache(placed.model, max_length, width=self.verify_width)
        self.max_length = max_length
        self._tokens: list[int] = []  # the prompt whose keys and values the cache holds
        self._logits: torch.Tensor | None = None  # (1, V), what followed it

    def rows_for(self, proposals: int) -> int:
        """The smallest number of rows that holds a token and so many proposals."""
        return next(rows for rows in self.rows if rows > proposals)

    def prefill(self, prompt: Sequence[int], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reads the prompt, or what the cache does not hold of it yet.

        Keys and values are kept up to the last border between chunks before which this prompt equals the last one:
        there the chunks, hence the bits, are the same as in a fresh session.

        Returns:
            Logits of the last token, (1, V); with taps the states of all tokens, (T, len(taps) * n_embd), else None.
        """
        tokens = list(prompt)
        if tokens == self._tokens and self._logits is not None and not taps:
            return self._logits, None
        shared = self.shares(tokens)
        # At least one token is left to run, whose logits are wanted.
        start = 0 if taps else min(shared, len(tokens) - 1) // PREFILL_CHUNK * PREFILL_CHUNK
        self._tokens = []
        idx = self.placed.same(torch.tensor([tokens[start:]], device=self.device))
        result = self.model.prefill(idx, self.cache, start=start, chunk_size=PREFILL_CHUNK, taps=taps)
        logits, hidden = result if taps else (result, None)
        self._tokens, self._logits = tokens, logits[0]
        return self._logits, None if hidden is None else hidden[0]

    def shares(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that the cache holds already."""
        shared = 0
        while shared < min(len(prompt), len(self._tokens)) and prompt[shared] == self._tokens[shared]:
            shared += 1
        return shared

    def verify(
        self, token: int, input_pos: int, proposal: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the last committed token, a proposal, and padding up to a number of rows of the class.

        Args:
            token: The last committed token.
            input_pos: Its position.
            proposal: (m,) int64, m < W.

        Returns:
            Logits (rows, V), of which row i follows the i-th of these tokens; with taps the states, (rows, ...), else
            None.
        """
        rows = self.rows_for(proposal.size(0))
        block = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        block[0, 0] = token
        block[0, 1 : 1 + proposal.size(0)] = proposal
        result = self.model.verify(
            self.placed.same(block),
            self.cache.slots[input_pos : input_pos + 1],  # a number that is on the device already
            self.cache,
            kv_length=self.cache.bucket(input_pos + rows),
            taps=taps,
        )
        logits, hidden = result if taps else (result, None)
        return logits[0], None if hidden is None else hidden[0]

    def forget(self) -> None:
        """Keeps nothing of the last prompt for the next one."""
        self._tokens, self._logits = [], None

    def clear(self) -> None:
        """Zeroes the slot: a mask does not hide a NaN."""
        self.forget()
        for buffer in (*self.cache.k, *self.cache.v):
            buffer.zero_()


class Slots:
    """The slots of one K/V cache, one text in each.

    Attributes:
        cache: Keys and values of all slots, (B, G, S, D) a layer.
        sessions: One for each slot.
        max_length: Tokens that a text may have, prompt and completion together.

    Args:
        placed: The target.
        count: B.
        max_length: See above.
        stop_ids: See `TargetSession`.
    """

    def __init__(self, placed: Placed, count: int, max_length: int, stop_ids: Sequence[int] = ()) -> None:
        self.placed = placed
        self.max_length = max_length
        width = placed.runner.rows(placed.rows)[-1]
        self.cache = placed.runner.make_cache(placed.model, max_length, width=width, batch_size=count)
        self.sessions = [
            TargetSession(
                placed, max_length, stop_ids, self.cache if count == 1 else self.cache.sequences(slot, slot + 1)
            )
            for slot in range(count)
        ]

    def buffers(self, first: int, count: int) -> KVCache:
        """Keys and values of `count` slots from `first` on."""
        if count == len(self.sessions):
            return self.cache
        return self.sessions[first].cache if count == 1 else self.cache.sequences(first, first + count)

    def groups(self, numbers: Sequence[int], rows: int) -> list[tuple[int, int]]:
        """Ranges of slots that run in one forward each: first slot and number of slots.

        Args:
            numbers: Slots that hold a running text, in rising order.
            rows: Rows of each.
        """
        if len(numbers) == 1:
            return [(numbers[0], 1)]
        # The rows of a forward keep their bits up to so many.
        most = max(1, self.placed.most_rows // rows)
        groups: list[tuple[int, int]] = []
        for number in numbers:
            if groups and number < groups[-1][0] + most:
                groups[-1] = groups[-1][0], number - groups[-1][0] + 1
            else:
                groups.append((number, 1))
        return groups
