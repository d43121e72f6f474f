"""The engine: runs many texts on one target. Texts are added, stepped and cancelled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from litspec.engine.costs import timed
from litspec.engine.sequence import Block, Text
from litspec.engine.speculate import Slot, prepare, run_round
from litspec.engine.target import PREFILL_CHUNK, Placed, Slots
from litspec.errors import InputError
from litspec.stopping import Stop

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter
    from litspec.drafters.speculative_k import RoundCosts, SpeculativeK
    from litspec.grammar import Grammar
    from litspec.sampling import Sampler


@dataclass
class Request:
    """One text to generate.

    Attributes:
        prompt: Token ids, at least one.
        max_length: Most tokens of prompt and completion together.
        stop: Detects where the text ends.
        sampler: Chooses its tokens.
        choose_k: Chooses the k of each round.
        grammar: The grammar that the text must match; None for no constraint. `sampler` and `stop` use it too.
        draft_seconds, verify_seconds: See `Slot`; set when the text has ended.
    """

    prompt: Sequence[int]
    max_length: int
    stop: Stop
    sampler: Sampler
    choose_k: SpeculativeK
    grammar: Grammar | None = None
    draft_seconds: float = field(default=0.0, init=False)
    verify_seconds: float = field(default=0.0, init=False)


class Engine:
    """Runs many texts in the slots of one target. When a text ends, its slot takes the next one (continuous batching).

    The K/V cache is not changed when a proposal is rejected: entries after the last committed token are masked until
    they are overwritten.

    Attributes:
        drafter, stop_ids: For texts that get a slot from now on, see below.

    Args:
        placed: The target.
        drafter: The drafter; None for plain decoding.
        slots: Texts that run at the same time.
        max_length: Most tokens of a text.
        stop_ids: Single tokens that end a text.
    """

    def __init__(
        self, placed: Placed, drafter: Drafter | None, *, slots: int = 1, max_length: int, stop_ids: Sequence[int] = ()
    ) -> None:
        self.placed = placed
        self.max_length = max_length
        self.stop_ids = tuple(stop_ids)
        self.drafter = drafter
        self._cache = Slots(placed, slots, max_length, stop_ids)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, tuple[int, Request, Slot]] = {}  # by number of the slot: handle, request, slot
        self._failed: dict[int, InputError] = {}  # by handle, why a text could not begin
        self._handles = 0

    def __len__(self) -> int:
        """Texts that have not ended."""
        return len(self._waiting) + len(self._running) + len(self._failed)

    @property
    def slots(self) -> int:
        """Texts that can run at the same time."""
        return len(self._cache.sessions)

    @property
    def running(self) -> int:
        """Texts that have a slot."""
        return len(self._running)

    def add(self, request: Request) -> int:
        """Queues a text until a slot is free; returns its handle.

        Raises:
            InputError: The text could never fit.
        """
        if request.max_length > self.max_length:
            raise InputError(
                f"A text of up to {request.max_length} tokens does not fit an engine for {self.max_length}; make one "
                "with a larger max_length."
            )
        if not 1 <= len(request.prompt) < request.max_length:
            raise InputError(
                f"A text needs a prompt of at least one token and room for one more; got {len(request.prompt)} tokens "
                f"and max_length = {request.max_length}."
            )
        self._handles += 1
        self._waiting.append((self._handles, request))
        return self._handles

    @torch.inference_mode()
    def step(self) -> dict[int, Block | InputError]:
        """Advances every running text by one block: the first token after a prompt, else the tokens of a round.

        Prompts of other texts are read at the same time. Short prompts are read in the same forward, long ones in
        chunks, about one chunk per step.

        Returns:
            By handle: the block, or the error that ended the text. At least one entry, if there is any text. A text
            that has ended or failed no longer has a slot.
        """
        results = self._step()
        while not results and self._running:
            results = self._step()
        return results

    def _step(self) -> dict[int, Block | InputError]:
        """Like `step`, but the result may be empty while prompts are being read."""
        self.prepare()
        results: dict[int, Block | InputError] = dict(self._failed)
        self._failed.clear()
        texts = dict(sorted(self._running.items()))
        running = [slot for _, _, slot in texts.values() if slot.text.started]
        # Running texts wait for at most one chunk of other prompts.
        budget = PREFILL_CHUNK if running else None
        for handle, request, slot in texts.values():
            if not slot.text.started:
                try:
                    if slot.read_in_round(request.prompt, self._cache):
                        running.append(slot)
                        continue
                    if budget == 0:
                        continue
                    count, first = slot.prefill(request.prompt, self._cache, budget)
                    budget = None if budget is None else max(0, budget - count)
                    if first is not None:
                        results[handle] = slot.commit(first)
                except InputError as error:
                    slot.error = error
        running.sort(key=lambda slot: slot.number)
        for slot, tokens, proposed in run_round(running, self._cache) if running else []:
            results[texts[slot.number][0]] = slot.commit(tokens, proposed)
        for handle, request, slot in texts.values():
            if slot.error is not None:
                results[handle] = slot.error
            if slot.error is not None or slot.text.finished:
                self._end(request, slot)
        return results

    def cancel(self, handle: int) -> None:
        """Cancels a text and frees its slot. Does nothing if it has ended already."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != handle)
        self._failed.pop(handle, None)
        for running, request, slot in list(self._running.values()):
            if running == handle:
                self._end(request, slot)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Gives free slots to waiting texts and builds the compiled steps they need. `step` calls this."""
        while self._waiting and len(self._running) < self.slots:
            handle, request = self._waiting.popleft()
            free = [i for i in range(self.slots) if i not in self._running]
            # The slot whose cache holds the longest prefix of the prompt; the first one in a tie.
            prompt, taps = list(request.prompt), () if self.drafter is None else self.drafter.taps
            number = max(free, key=lambda i: (self._cache.sessions[i].holds(prompt, taps), -i))
            try:
                slot = self._open(request, number)
                self._running[number] = handle, request, slot
                prepare(slot, self._cache)
            except InputError as error:
                self._failed[handle] = error
                if number in self._running:
                    self._end(*self._running[number][1:])

    def reserve(self) -> None:
        """Allocates what the drafter keeps for all texts, before the first text."""
        if self.drafter is not None:
            self.drafter.reserve(self._cache.sessions[0])

    def time_rounds(self, drafter: Drafter, most: int, sampler: Sampler, count: int = 1) -> RoundCosts:
        """Measures the cost of rounds. No text may be running.

        Args:
            drafter: The drafter.
            most: Largest k.
            sampler: How tokens are chosen.
            count: Texts in a round, at most `slots`.
        """
        return timed(self._cache, drafter, most, sampler, count)

    def _open(self, request: Request, number: int) -> Slot:
        """Puts a text into a slot; nothing of its prompt has been read."""
        target, drafter = self._cache.sessions[number], self.drafter
        target.stop_ids = self.stop_ids
        text = Text(len(request.prompt), request.max_length, request.stop)
        draft = None if drafter is None else drafter.start(target, request.max_length, request.sampler)
        return Slot(text, target, drafter, draft, request.sampler, request.choose_k, request.grammar)

    def _end(self, request: Request, slot: Slot) -> None:
        del self._running[slot.number]
        request.draft_seconds, request.verify_seconds = slot.draft_seconds, slot.verify_seconds
        if slot.draft is not None:
            slot.draft.close()
