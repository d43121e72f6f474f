"""The target's side of the engine: the placed model and the slots of its K/V cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from litspec.engine.runner import Runner
from litspec.model import GPT, KVCache

# Tokens of a prompt that are read in one forward; another size would change the last bits of its keys and values.
PREFILL_CHUNK = 512


class Placed(Protocol):
    """A target whose weights have been placed on one or more devices (see `litspec.placement`).

    Attributes:
        model: The model. Its results are complete and on `device`, on every rank.
        device: Device of tokens and logits.
        verify_width: W, the most rows of a verification.
        rows: Row counts with equal bits, in rising order. A verification uses one of them; the last is at least W.
        most_rows: The most rows in one forward of several texts that keep these bits.
        draft_model: The model of the draft checkpoint, if there is one.
        runner: Runs the steps.
        rank: Rank of this process, 0 for a single process.
        world_size: Number of processes.
        is_rank_zero: Whether this process prints and writes files.
    """

    model: GPT
    device: torch.device
    verify_width: int
    draft_model: GPT | None
    runner: Runner
    rank: int
    world_size: int

    __dataclass_fields__: ClassVar[dict[str, Any]]  # implementations are dataclasses, for `replace`

    @property
    def rows(self) -> tuple[int, ...]: ...

    @property
    def most_rows(self) -> int: ...

    @property
    def is_rank_zero(self) -> bool: ...

    def wait_for_all(self) -> None:
        """Reports that this rank has finished its share of many prompts. On rank 0, returns when all ranks have.

        Raises:
            LostRank: A rank died before it finished.
        """
        ...

    def same(self, tokens: torch.Tensor) -> torch.Tensor:
        """Makes the tokens that the target is about to run equal on every rank; may change them in place."""
        ...

    def share_int(self, value: int) -> int:
        """Rank 0's number, for all ranks that generate a text together."""
        ...

    def agree(self, packed: torch.Tensor, count: int, decide: Callable[[list[int]], list[int]]) -> list[int]:
        """Reads the outcome of a round to the host, equal on every rank. This is the only read of the round.

        Args:
            packed: (n,) int64, this rank's outcome.
            count: How many numbers `decide` returns.
            decide: Given the outcome, decides about the next round; called on one rank only.

        Returns:
            The deciding rank's outcome, followed by its decision.
        """
        ...


class TargetSession:
    """One text's session with the target: a slot of the K/V cache and its contents.

    Attributes:
        model: The target.
        config: Its LitGPT config.
        cache: Keys and values of this text only. Positions after the committed tokens hold stale entries that are never
            read.
        device: Device of tokens and logits.
        rows: Row counts that a verification may use.
        verify_width: W, the largest row count.
        runner: Runs the steps.
        stop_ids: Single tokens that end the text; drafters may use them to shorten proposals.
        max_length: Most tokens of a text, prompt and completion together.
        number: Number of the slot.
        whole: Keys and values of all slots.
        shared: Data that drafters share between all slots, by drafter; it lives as long as the engine.
    """

    def __init__(
        self,
        placed: Placed,
        max_length: int,
        stop_ids: Sequence[int] = (),
        whole: KVCache | None = None,
        number: int = 0,
        shared: dict[Any, Any] | None = None,
    ) -> None:
        self.placed = placed
        self.model = placed.model
        self.config = placed.model.config
        self.device = placed.device
        self.runner = placed.runner
        self.rows = placed.runner.rows(placed.rows)
        self.verify_width = self.rows[-1]
        self.stop_ids = tuple(stop_ids)
        self.whole = whole or self.runner.make_cache(placed.model, max_length, width=self.verify_width)
        self.number = number
        self.cache = self.whole if self.whole.shape[0] == 1 else self.whole.sequences(number, number + 1)
        self.shared: dict[Any, Any] = {} if shared is None else shared
        self.max_length = max_length
        self._tokens: list[int] = []  # tokens of the prompt that have been read; the cache holds their K/V
        self._logits: torch.Tensor | None = None  # (1, V), logits after the prompt
        self._prompt: list[int] = []  # the prompt being read
        self._taps: tuple[int, ...] = ()
        self._borders: list[torch.Tensor] = []  # (1, len(taps) * C), the last state of each chunk of the prompt
        self._border_taps: tuple[int, ...] = ()  # the taps of these states

    def rows_for(self, proposals: int) -> int:
        """The smallest row count that holds a token and this many proposals."""
        return next(rows for rows in self.rows if rows > proposals)

    def prefill(self, prompt: Sequence[int], taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reads a whole prompt, or the part of it that the cache does not hold yet.

        Returns:
            Logits of the last token, (1, V). With taps, the states of all tokens, (T, len(taps) * n_embd), else None.
        """
        self.begin(prompt, taps)
        states = []
        while self.unread:
            states.append(self.read())
        return self.logits, torch.cat([each for each in states if each is not None]) if taps else None

    def begin(
        self,
        prompt: Sequence[int],
        taps: Sequence[int] = (),
        others: Sequence[TargetSession] = (),
        resume: Callable[[Sequence[int], int], int] | None = None,
    ) -> None:
        """Sets a prompt, which `read` then reads chunk by chunk.

        Keys and values of the previous prompt are reused for the common prefix, rounded down to whole chunks: there the
        chunks, and so the bits, are the same as in a fresh session. They are copied from another slot if it holds more
        of the prompt.

        Args:
            prompt: Token ids, at least one.
            taps: Blocks whose states are wanted.
            others: Sessions of other slots.
            resume: With taps, `DraftSession.resume`, which lets the drafter reuse its own state for the prefix. None
                reads the prompt from its beginning.
        """
        self._prompt, self._taps = list(prompt), tuple(taps)
        best = max((self, *others), key=lambda session: session.holds(self._prompt, self._taps))
        held = best.holds(self._prompt, self._taps)
        if self._taps:
            held = resume(self._prompt, held) if resume is not None and held else 0
        if best is not self:
            self.cache.copy_from(best.cache, held)
        self._logits = best._logits if held == len(self._prompt) else None
        self._borders, self._border_taps = best._borders[: held // PREFILL_CHUNK], best._border_taps
        self._tokens = self._prompt[:held]

    @property
    def unread(self) -> int:
        """Tokens of the prompt that have yet to be read."""
        return len(self._prompt) - len(self._tokens)

    @property
    def logits(self) -> torch.Tensor:
        """Logits of the last token of the prompt, (1, V)."""
        if self._logits is None:
            raise RuntimeError("The prompt has not been read.")
        return self._logits

    @property
    def last_state(self) -> torch.Tensor | None:
        """With taps, the state of the last reused token, (1, len(taps) * n_embd); None if no token was reused."""
        return self._borders[-1] if self._taps and self._tokens and self._borders else None

    def read(self) -> torch.Tensor | None:
        """Reads the next chunk of the prompt. With taps, returns its states, (rows, len(taps) * n_embd)."""
        start, prompt, borders = len(self._tokens), self._prompt, self._borders
        end = min(start + PREFILL_CHUNK, len(prompt))
        idx = self.placed.same(torch.tensor([prompt[start:end]], device=self.device))
        self.forget()
        result = self.model.prefill(idx, self.cache, start=start, chunk_size=PREFILL_CHUNK, taps=self._taps)
        logits, hidden = result if isinstance(result, tuple) else (result, None)
        self._tokens = prompt[:end]
        self._logits = logits[0] if end == len(prompt) else None
        if hidden is not None and end % PREFILL_CHUNK == 0 and len(borders) == start // PREFILL_CHUNK:
            borders = [*borders, hidden[0, -1:].clone()]
            self._border_taps = self._taps
        self._borders = borders
        return None if hidden is None else hidden[0]

    def has_read(self, count: int, logits: torch.Tensor) -> None:
        """Records that a round has read the next tokens of the prompt, with the logits (1, V) after them."""
        self._tokens = self._prompt[: len(self._tokens) + count]
        self._logits = None if self.unread else logits

    def holds(self, prompt: Sequence[int], taps: Sequence[int] = ()) -> int:
        """Tokens at the beginning of a prompt that need not be read again: the whole prompt, or whole chunks.

        Args:
            prompt: Token ids.
            taps: Blocks whose states are wanted. Then only chunks whose last state is stored count.
        """
        if self._logits is not None and self._tokens == prompt and not taps:
            return len(prompt)
        # At least one token must run, to get its logits.
        end = min(len(prompt) - 1, len(self._tokens)) // PREFILL_CHUNK * PREFILL_CHUNK
        if taps:
            end = min(end, len(self._borders) * PREFILL_CHUNK) if tuple(taps) == self._border_taps else 0
        while self._tokens[:end] != prompt[:end]:
            end -= PREFILL_CHUNK
        return end

    def verify(
        self, token: int, input_pos: int, proposal: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the last committed token, a proposal, and padding up to a row count of the class.

        Args:
            token: The last committed token.
            input_pos: Its position.
            proposal: (m,) int64, m < W.

        Returns:
            Logits (rows, V), where row i follows token i of the block. With taps, the states, (rows, ...), else None.
        """
        rows = self.rows_for(proposal.size(0))
        block = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        block[0, 0] = token
        block[0, 1 : 1 + proposal.size(0)] = proposal
        result = self.model.verify(
            self.placed.same(block),
            self.cache.slots[input_pos : input_pos + 1],  # a view, which avoids a copy to the device
            self.cache,
            kv_length=self.cache.bucket(input_pos + rows),
            taps=taps,
        )
        logits, hidden = result if isinstance(result, tuple) else (result, None)
        return logits[0], None if hidden is None else hidden[0]

    def forget(self) -> None:
        """Makes the next prompt be read from its beginning."""
        self._tokens, self._logits, self._borders = [], None, []

    def clear(self) -> None:
        """Zeroes the slot's keys and values, since the attention mask does not remove a NaN."""
        self.forget()
        for buffer in (*self.cache.k, *self.cache.v):
            buffer.zero_()


class Slots:
    """The slots of one K/V cache, one text in each.

    Attributes:
        cache: Keys and values of all slots, (B, G, S, D) per layer.
        sessions: One target session per slot.
        max_length: Most tokens of a text, prompt and completion together.

    Args:
        placed: The target.
        count: B, the number of slots.
        max_length: See above.
        stop_ids: See `TargetSession`.
    """

    def __init__(self, placed: Placed, count: int, max_length: int, stop_ids: Sequence[int] = ()) -> None:
        self.placed = placed
        self.max_length = max_length
        width = placed.runner.rows(placed.rows)[-1]
        # Twice the width: idle slots write to the end of the buffer, also in drafts by the target's own layers.
        self.cache = placed.runner.make_cache(placed.model, max_length, width=2 * width, batch_size=count)
        shared: dict[Any, Any] = {}
        self.sessions = [
            TargetSession(placed, max_length, stop_ids, self.cache, number, shared) for number in range(count)
        ]

    def begin(
        self,
        number: int,
        prompt: Sequence[int],
        taps: Sequence[int],
        resume: Callable[[Sequence[int], int], int] | None = None,
    ) -> None:
        """Gives a prompt to a slot, see `TargetSession.begin`."""
        others = [session for session in self.sessions if session.number != number]
        self.sessions[number].begin(prompt, taps, others, resume)

    def groups(self, numbers: Sequence[int], rows: int) -> list[range]:
        """Groups of slots; each group runs in one forward.

        Args:
            numbers: Slots that hold a running text, in rising order.
            rows: Rows per slot.
        """
        if len(numbers) == 1:
            return [range(numbers[0], numbers[0] + 1)]
        # With more than `most_rows` rows a forward may give other bits.
        return neighbours(numbers, max(1, self.placed.most_rows // rows))


def neighbours(numbers: Sequence[int], most: int) -> list[range]:
    """Splits slots, in rising order, into ranges of at most `most` slots. A range may include idle slots."""
    groups: list[range] = []
    for number in numbers:
        if groups and number < groups[-1].start + most:
            groups[-1] = range(groups[-1].start, number + 1)
        else:
            groups.append(range(number, number + 1))
    return groups
