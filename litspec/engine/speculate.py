"""One round for all running texts: propose, verify, accept, and one read to the host.

`litspec.reference` has the same algorithm for one text, in its shortest form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.engine.sequence import Block, Text
from litspec.engine.target import Slots, TargetSession
from litspec.errors import InputError
from litspec.logprobs import TokenLogprobs
from litspec.sampling import Choosing, Distribution, Inputs, Sampler, right_prefix

if TYPE_CHECKING:
    from litspec.drafters.speculative_k import SpeculativeK
    from litspec.grammar import Grammar
    from litspec.model import KVCache


# A prompt of at most this many blocks is read in rounds, together with the running texts.
SHORT_BLOCKS = 2


class PromptPart(NamedTuple):
    """Tokens of a short prompt that a round reads, instead of verifying a proposal for this text.

    Attributes:
        prompt: The whole prompt.
        start: Position of the first token to read.
        end: Position after the last token.
    """

    prompt: Sequence[int]
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether this is the last part of the prompt, so that the text's first token follows."""
        return self.end == len(self.prompt)


@dataclass(eq=False)
class Slot:
    """A text in a slot.

    Attributes:
        text: Its length limit, stops and committed tokens.
        target: Its session with the target.
        drafter: The drafter; None for plain decoding.
        draft: The text's session with the drafter.
        sampler: Chooses its tokens.
        choose_k: Chooses the k of each round.
        grammar: The grammar that the text must match; None for no constraint.
        speculative_k: The k of the next round.
        draft_seconds: Host time of the proposals of its rounds, for all texts together. On a GPU, kernels run
            asynchronously, so only the sum with `verify_seconds` is exact.
        verify_seconds: Host time of verifying, reading and committing.
        error: The error that ended the text: its drafter broke the protocol, or a number was not finite.
        logprobs: Log-probabilities of the last round's tokens, if requested.
        stops: (s,), tokens that end the text; None for none.
        reading: The part of the prompt that the next round reads. None if the text is running, or if its prompt is read
            in chunks.
    """

    text: Text
    target: TargetSession
    drafter: Drafter | None
    draft: DraftSession | None
    sampler: Sampler
    choose_k: SpeculativeK
    grammar: Grammar | None = None
    speculative_k: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    error: InputError | None = None
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    stops: torch.Tensor | None = field(init=False, default=None)
    reading: PromptPart | None = field(init=False, default=None)
    _begun: bool = field(init=False, default=False)
    _last_state: torch.Tensor | None = field(init=False, default=None)  # (1, len(taps) * C), of the last token read

    def __post_init__(self) -> None:
        if self.target.stop_ids:
            self.stops = torch.tensor(self.target.stop_ids, device=self.target.device)

    def commit(self, tokens: list[int], proposed: int = 0) -> Block:
        """Commits the tokens of a round, see `Text.commit`."""
        self.sampler.commit(tokens)
        return self.text.commit(tokens, proposed, self.logprobs)

    @property
    def size(self) -> int:
        """Count of numbers in its outcome."""
        width, wanted = self.target.verify_width, self.sampler.logprobs
        return HEAD + width + (0 if wanted is None else wanted.size(width))

    @property
    def number(self) -> int:
        """Number of the slot."""
        return self.target.number

    @property
    def taps(self) -> tuple[int, ...]:
        """Blocks of the target whose states the draft session receives."""
        return () if self.drafter is None else tuple(self.drafter.taps)

    @property
    def next_k(self) -> int:
        """The most proposals that the next round can use."""
        return min(self.speculative_k, self.text.most_proposals, self.target.verify_width - 1)

    @property
    def batch_key(self) -> Hashable:
        """Sampling settings: equal for texts whose tokens can be chosen together."""
        return self.sampler.batch_key, self.target.stop_ids

    @property
    def block(self) -> tuple[Sequence[int], int]:
        """First tokens of its block (the last committed token, or a part of the prompt), and their position."""
        if self.reading is not None:
            return self.reading.prompt[self.reading.start : self.reading.end], self.reading.start
        return (self.text.last,), self.text.input_pos

    def read_in_round(self, prompt: Sequence[int], cache: Slots) -> bool:
        """Schedules the next part of a short prompt for the next round. Returns False if the prompt is read in chunks.

        One more text in a round costs little; a separate forward would cost a whole step. The choice depends only on
        the prompt's length, not on the drafter, and the rows of a block have equal bits in every round. Compiled steps
        have one graph that only verifies, so with them all prompts are read in chunks.
        """
        target = self.target
        short = len(prompt) <= SHORT_BLOCKS * target.verify_width
        if not short or target.runner.compiles:
            return False
        self._begin(prompt, cache)
        start = len(prompt) - target.unread
        self.reading = None
        if target.unread:
            self.reading = PromptPart(prompt, start, min(start + target.verify_width, len(prompt)))
        return self.reading is not None

    def _begin(self, prompt: Sequence[int], cache: Slots) -> None:
        if not self._begun:
            cache.begin(self.number, prompt, self.taps, None if self.draft is None else self.draft.resume)
            self._begun, self._last_state = True, self.target.last_state

    def prefill(self, prompt: Sequence[int], cache: Slots, most: int | None) -> tuple[int, list[int] | None]:
        """Reads the prompt, or a part of it.

        Args:
            prompt: The whole prompt.
            cache: All slots.
            most: Stops after the chunk that reaches this many tokens; None reads the whole prompt.

        Returns:
            How many tokens were read, and the first token of the text if the whole prompt has been read.
        """
        target = self.target
        self._begin(prompt, cache)
        before = target.unread
        while target.unread and (most is None or before - target.unread < most):
            begin = len(prompt) - target.unread
            hidden = target.read()
            self.tell_states(prompt[begin : len(prompt) - target.unread], begin, hidden)
        read = before - target.unread
        return read, None if target.unread else self._first_token(prompt)

    def _first_token(self, prompt: Sequence[int]) -> list[int]:
        target, position = self.target, len(prompt)
        none = torch.empty(1, 0, dtype=torch.int64, device=target.device)
        inputs = Inputs.stacked([self.sampler.inputs(target.device, position)])
        packed = outcome(self.sampler, target.logits.unsqueeze(0), inputs, none, None, None, target.verify_width)
        found = _read([self], [self.size], packed, lambda _: [self.choose_k.choose()])
        if self.error is not None:
            raise self.error
        tokens, _ = found[self.number]
        self.tell_drafter(prompt, tokens)
        return tokens

    def tell_states(self, tokens: Sequence[int], begin: int, hidden: torch.Tensor | None) -> None:
        """Commits a part of the prompt to a draft session with taps; `hidden` holds the states of its tokens."""
        if hidden is not None and self.draft is not None:
            # A drafter receives, in row j, the state that predicted token j: the state one position before it.
            first = torch.zeros_like(hidden[:1]) if self._last_state is None else self._last_state
            self.draft.commit(list(tokens), begin, torch.cat((first, hidden[:-1])))
            self._last_state = hidden[-1:].clone()

    def tell_drafter(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Commits the prompt and the first token to the draft session."""
        if self.draft is not None:
            if not self.taps:
                self.draft.commit(list(prompt), 0, None)
            self.draft.commit(list(tokens), len(prompt), self._last_state)


# Count of numbers in an outcome before its tokens.
HEAD = 4


def outcome(
    sampler: Sampler,
    logits: torch.Tensor,
    inputs: Inputs,
    tokens: torch.Tensor,
    q: Distribution | None,
    stops: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """Chooses the tokens of N texts and packs what the host needs: (N, 4 + W) int64, wider with log-probabilities.

    For each text: the number accepted, whether all numbers were finite, the number proposed, whether all ids exist, W
    tokens of which the accepted ones and one more are committed, and their log-probabilities if requested.

    Args:
        sampler: The sampler of any of the texts; they differ only in their `inputs`.
        logits: (N, rows, V), the target's.
        inputs: Inputs of the samplers.
        tokens: (N, rows - 1), the proposals; -1 at the end is padding.
        q: The distributions that they were drawn from.
        stops: (s,), tokens that end the texts; None for none.
        width: W. The outcome has a fixed size, so that ranks with different proposals can exchange it.
    """
    vocab_size = logits.size(-1)
    proposed = tokens.clamp(max=vocab_size - 1)
    verified = sampler.verify(logits, inputs, proposed, q)
    accepted = verified.accepted
    if tokens.size(-1) and stops is not None:
        # Proposals after a stop are not part of the text and must not count as accepted.
        accepted = accepted.minimum(right_prefix(~(tokens.unsqueeze(-1) == stops).any(-1)) + 1)
    given = tokens >= 0
    count = given.sum(-1)
    # -1 is the only valid negative number: padding, only at the end.
    ids_exist = ((tokens < vocab_size) & (tokens >= -1)).all(-1) & (right_prefix(given) == count)
    head = torch.stack((accepted, verified.finite.long(), count, ids_exist.long()), -1)
    parts = [head, F.pad(verified.tokens, (0, width - verified.tokens.size(-1)))]
    if sampler.logprobs is not None:
        measured = sampler.measure(logits, inputs, proposed, verified.tokens.clamp_min(0), sampler.logprobs)
        parts.append(sampler.logprobs.pack(measured, width))
    return torch.cat(parts, -1)


def run_round(slots: Sequence[Slot], cache: Slots) -> list[tuple[Slot, list[int], int]]:
    """One round of some texts.

    Args:
        slots: The texts, ordered by slot number; they are running, or `reading` a part of their prompt.
        cache: All slots.

    Returns:
        For each text: the slot, the tokens to commit (the accepted proposals and one token of the target's own), and
        how many tokens were proposed. Texts with an unfinished prompt or an `error` are left out.
    """
    cache.placed.runner.begin_round()
    began = time.perf_counter()
    proposals = propose([slot for slot in slots if slot.reading is None], cache.placed.device)
    proposals |= {slot.number: _nothing(cache.placed.device) for slot in slots if slot.reading is not None}
    slots = [slot for slot in slots if slot.error is None]
    if not slots:
        return []
    drafted = time.perf_counter()

    outcomes = verify(slots, proposals, cache)

    def next_ks(numbers: list[int]) -> list[int]:
        for slot, begin in zip(outcomes.order, accumulate(outcomes.sizes, initial=0)):
            if slot is not None and slot.reading is None:
                accepted, _, proposed = numbers[begin : begin + 3]
                slot.choose_k.observe(proposed=proposed, accepted=accepted)
        # A text with an unfinished prompt needs no k yet.
        waits = [slot is None or (slot.reading is not None and not slot.reading.last) for slot in outcomes.order]
        return [0 if wait or slot is None else slot.choose_k.choose() for slot, wait in zip(outcomes.order, waits)]

    found = _read(outcomes.order, outcomes.sizes, outcomes.packed, next_ks)
    going_on = []
    for slot in slots:
        part, slot.reading = slot.reading, None
        if slot.error is not None:
            continue
        if part is not None:
            count, states = part.end - part.start, outcomes.states.get(slot.number)
            slot.target.has_read(count, outcomes.logits[slot.number])
            slot.tell_states(part.prompt[part.start : part.end], part.start, None if states is None else states[:count])
            if not part.last:
                continue
            slot.tell_drafter(part.prompt, found[slot.number][0])
        elif slot.draft is not None:
            tokens = found[slot.number][0]
            states = outcomes.states.get(slot.number)
            states = None if states is None else states[: len(tokens)]
            # A copy: the drafter may change it.
            slot.draft.commit(list(tokens), slot.text.input_pos + 1, states)
        going_on.append((slot, *found[slot.number]))
    ended = time.perf_counter()
    for slot in slots:
        if slot.text.started:
            slot.draft_seconds += drafted - began
            slot.verify_seconds += ended - drafted
    return going_on


def _nothing(device: torch.device) -> Proposal:
    return Proposal(torch.empty(0, dtype=torch.int64, device=device))


def propose(slots: Sequence[Slot], device: torch.device) -> dict[int, Proposal]:
    """The proposals for some texts, by slot; each has at most `next_k` tokens.

    If a drafter breaks the protocol, its texts get an `error` instead.
    """
    Sampler.start_rounds([slot.sampler for slot in slots], [slot.text.input_pos + 1 for slot in slots], device)
    found: dict[int, Proposal] = {}
    asked: dict[int, list[Slot]] = {}  # by drafter
    for slot in slots:
        if slot.draft is None or slot.next_k < 1:
            found[slot.number] = _nothing(device)
        elif forced := _forced(slot):
            found[slot.number] = Proposal(torch.tensor(forced, device=device))
        else:
            asked.setdefault(id(slot.drafter), []).append(slot)
    for members in asked.values():
        drafter = members[0].drafter
        together = drafter is not None and type(drafter).propose_batch is not Drafter.propose_batch
        for part in [members] if together else [[slot] for slot in members]:
            try:
                for slot, proposal in zip(part, _asked(part), strict=True):
                    tokens, q = checked(proposal, slot.drafter.name if slot.drafter else "", slot.target)
                    tokens = tokens[: slot.next_k]
                    found[slot.number] = Proposal(tokens, None if q is None else q.first(tokens.size(0)))
            except InputError as error:
                for slot in part:
                    slot.error = error
    for slot in slots:
        if slot.grammar is not None and slot.error is None:
            # The tokens that a grammar allows depend on those before, so the host needs the proposal already here.
            try:
                slot.grammar.foresee(found[slot.number].tokens.tolist())
            except InputError as error:
                slot.error = error
    return found


def _forced(slot: Slot) -> list[int]:
    """The next tokens that the grammar forces, if they are at least half of the proposal; else none."""
    forced = [] if slot.grammar is None else slot.grammar.forced(slot.next_k)
    return forced if 2 * len(forced) >= slot.next_k else []


def _asked(slots: Sequence[Slot]) -> Sequence[Proposal]:
    """The proposals of one drafter for some texts."""
    drafter = slots[0].drafter
    sessions = [slot.draft for slot in slots if slot.draft is not None]
    if drafter is None:
        return []
    return drafter.propose_batch(
        sessions,
        [slot.text.last for slot in slots],
        [slot.text.input_pos for slot in slots],
        [slot.next_k for slot in slots],
    )


def checked(proposal: Proposal, drafter: str, target: TargetSession) -> Proposal:
    """Moves a proposal to the target's device and checks its form.

    Ids are not checked here, since that would read them to the host; `outcome` reports whether they exist.

    Raises:
        InputError: The proposal breaks the protocol.
    """
    tokens, q = (proposal.tokens, proposal.q) if isinstance(proposal, Proposal) else (proposal, None)
    if not isinstance(tokens, torch.Tensor):
        raise InputError(
            f"The drafter {drafter} must return a Proposal with a tensor of token ids, got a {type(tokens).__name__}."
        )
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        kind = str(tokens.dtype).removeprefix("torch.")
        raise InputError(
            f"The drafter {drafter} must propose token ids as whole numbers of shape (m,), got {kind} of shape "
            f"{tuple(tokens.shape)}."
        )
    tokens = tokens.to(target.device, torch.int64)
    if q is None:
        return Proposal(tokens)
    if not (isinstance(q, Distribution) and isinstance(q.probs, torch.Tensor) and q.probs.dim() == 2):
        raise InputError(f"The drafter {drafter} must report q as None or as a Distribution of probabilities (m, K).")
    if q.probs.size(0) < tokens.size(0) or (q.ids is not None and q.ids.shape != q.probs.shape):
        raise InputError(
            f"The drafter {drafter} proposed {tokens.size(0)} tokens, so q must have as many rows of "
            f"probabilities, and of ids where it is sparse; got probs of shape {tuple(q.probs.shape)} and ids of shape "
            f"{None if q.ids is None else tuple(q.ids.shape)}."
        )
    vocab_size = target.config.padded_vocab_size
    if q.ids is None and q.probs.size(1) > vocab_size:
        raise InputError(
            f"The drafter {drafter} reports q over {q.probs.size(1)} ids; the target's vocabulary has {vocab_size}."
        )
    probs = q.probs.to(target.device, torch.float32)
    if q.ids is None:
        return Proposal(tokens, Distribution(F.pad(probs, (0, vocab_size - probs.size(1)))))
    return Proposal(tokens, Distribution(probs, q.ids.to(target.device, torch.int64).clamp(0, vocab_size - 1)))


class Outcomes(NamedTuple):
    """Results of a verification, still on the device.

    Attributes:
        packed: The outcomes, one after the other.
        order: The text of each outcome; None for an idle slot.
        sizes: Count of numbers in each outcome.
        states: By slot, the states for its drafter, (rows, len(taps) * C).
        logits: By slot, the logits after a part of its prompt, (1, V).
    """

    packed: torch.Tensor
    order: list[Slot | None]
    sizes: list[int]
    states: dict[int, torch.Tensor]
    logits: dict[int, torch.Tensor]


def verify(slots: Sequence[Slot], proposals: dict[int, Proposal], cache: Slots) -> Outcomes:
    """Runs the target over the proposals of some texts and chooses their tokens."""
    most = max(len(slot.block[0]) - 1 + proposals[slot.number].tokens.size(0) for slot in slots)
    rows = slots[0].target.rows_for(most)
    parts: list[Outcomes] = []
    if cache.placed.runner.compiles:
        # Always run all slots, so that one graph per key is enough.
        by_key: dict[Hashable, list[Slot]] = {}
        for slot in slots:
            by_key.setdefault(slot.batch_key, []).append(slot)
        everything = range(len(cache.sessions))
        parts = [_verify_together(same, proposals, cache, everything, rows) for same in by_key.values()]
    else:
        for members in cache.groups([slot.number for slot in slots], rows):
            chosen = [slot for slot in slots if slot.number in members]
            parts.append(_verify_together(chosen, proposals, cache, members, rows))
    if len(parts) == 1:
        return parts[0]
    return Outcomes(
        torch.cat([part.packed for part in parts]),
        [slot for part in parts for slot in part.order],
        [size for part in parts for size in part.sizes],
        {number: states for part in parts for number, states in part.states.items()},
        {number: logits for part in parts for number, logits in part.logits.items()},
    )


def _verify_together(
    slots: Sequence[Slot], proposals: dict[int, Proposal], cache: Slots, members: range, rows: int
) -> Outcomes:
    """`verify` for texts among neighbouring slots, in one forward."""
    target = slots[0].target
    device, count = target.device, len(members)
    buffers = cache.cache.sequences(members.start, members.stop)
    # Idle slots run too. They write to the end of their buffer, which no text uses.
    tokens, places = [0] * count, [buffers.size - rows] * count
    for slot in slots:
        at = slot.number - members.start
        (tokens[at], *_), places[at] = slot.block
    block = torch.full((count, rows), -1, dtype=torch.int64, device=device)
    block[:, 0] = torch.tensor(tokens) if count > 1 else tokens[0]
    for slot in slots:
        proposed = proposals[slot.number].tokens
        if slot.reading is not None:
            block[slot.number - members.start, : len(slot.block[0])] = torch.tensor(slot.block[0])
        elif proposed.size(0):
            block[slot.number - members.start, 1 : 1 + proposed.size(0)] = proposed
    # For one text: a view, which avoids a copy to the device.
    input_pos = buffers.slots[places[0] :][:1] if count == 1 else torch.tensor(places, device=device)
    kv_length = buffers.bucket(max(slot.block[1] for slot in slots) + rows)
    step = Verification(target, slots, members, rows, kv_length)
    q = [step.form(same, proposals) for same in step.groups]
    inputs = [step.inputs(same) for same in step.groups]
    packed, hidden, logits = step.run(buffers, target.placed.same(block), input_pos, q, inputs)
    order = [slot for same in step.groups for slot in same]
    # The outcome of an idle slot is as large as the others.
    sizes = [next(slot.size for slot in same if slot is not None) for same in step.groups for _ in same]
    return Outcomes(packed, order, sizes, step.states(hidden), step.logits(logits))


class Verification:
    """The step of a verification, with the settings that are constants of its graph.

    Args:
        target: Any session of the target.
        slots: The texts, ordered by slot number.
        members: The slots that run.
        rows: Rows per slot.
        kv_length: Keys and values to read.

    Attributes:
        groups: The texts grouped by `Slot.batch_key`. A compiled step has one group, with None for each idle slot.
    """

    def __init__(self, target: TargetSession, slots: Sequence[Slot], members: range, rows: int, kv_length: int) -> None:
        self._target = target
        self._members = members
        self._rows = rows
        self._kv_length = kv_length
        self._slots = slots
        self.groups: list[list[Slot | None]]
        if target.runner.compiles:
            by_number = {slot.number: slot for slot in slots}
            self.groups = [[by_number.get(number) for number in members]]
        else:
            by_key: dict[Hashable, list[Slot | None]] = {}
            for slot in slots:
                by_key.setdefault(slot.batch_key, []).append(slot)
            self.groups = list(by_key.values())
        firsts = [next(slot for slot in same if slot is not None) for same in self.groups]
        self._samplers = [slot.sampler for slot in firsts]
        self._stops = [slot.stops for slot in firsts]
        # Indices of the running sequences of each group; None for all.
        self._numbers = [self._which(same) for same in self.groups]
        self._taps = tuple(dict.fromkeys(tap for slot in slots for tap in slot.taps))
        # Texts that read a part of their prompt, their indices, and the last row of each.
        self._readers = [slot for slot in slots if slot.reading is not None]
        self._reading = [slot.number - members.start for slot in self._readers]
        self._last_rows = [len(slot.block[0]) - 1 for slot in self._readers]

    def _which(self, same: Sequence[Slot | None]) -> tuple[int, ...] | None:
        if len(same) == len(self._members):
            return None
        return tuple(slot.number - self._members.start for slot in same if slot is not None)

    def inputs(self, same: Sequence[Slot | None]) -> Inputs:
        """Sampler inputs of a group of texts."""
        device, rows = self._target.device, self._rows
        own = [None if slot is None else slot.sampler.inputs(device, slot.text.input_pos + 1, rows) for slot in same]
        some = next(each for each in own if each is not None)
        return Inputs.stacked([some if each is None else each for each in own])

    def form(self, same: list[Slot | None], proposals: dict[int, Proposal]) -> Distribution | None:
        """The distributions q of the proposals of a group of texts, padded to rows - 1 rows.

        None if the sampler does not use q. All texts get one form, the widest that any of them needs: a fixed number of
        candidates, or dense. A deterministic proposal gets probability 1. Graphs have one of two forms: that of the
        sampler's own distributions, or dense.
        """
        sampler = self._samplers[self.groups.index(same)] if len(self.groups) > 1 else self._samplers[0]
        if isinstance(sampler, Choosing):
            return None
        empty = _nothing(self._target.device)
        own = [empty if slot is None else proposals[slot.number] for slot in same]
        given = [each.q for each in own if each.q is not None]
        compiles = self._target.runner.compiles
        if not given and not compiles:
            return None
        vocab_size = self._target.config.padded_vocab_size
        columns = max((q.probs.size(1) for q in given), default=1)
        dense = any(q.ids is None for q in given)
        if compiles:
            most = sampler.columns(vocab_size)
            dense = dense or columns > most or most == vocab_size
            columns = most
        return _stacked([_formed(each, self._rows - 1, None if dense else columns, vocab_size) for each in own])

    def states(self, hidden: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """By slot, the states of its drafter's taps, (rows, len(taps) * C), out of the states of all taps."""
        found: dict[int, torch.Tensor] = {}
        if hidden is None:
            return found
        for slot in self._slots:
            own = hidden[slot.number - self._members.start]
            if slot.taps and slot.taps != self._taps:
                parts = own.chunk(len(self._taps), dim=-1)
                own = torch.cat([parts[self._taps.index(tap)] for tap in slot.taps], dim=-1)
            if slot.taps:
                found[slot.number] = own
        return found

    def logits(self, logits: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """By slot, the logits after a part of its prompt, (1, V), out of those of all reading texts, (n, V)."""
        return {} if logits is None else {slot.number: logits[i : i + 1] for i, slot in enumerate(self._readers)}

    def key(self, buffers: KVCache, q: Sequence[Distribution | None]) -> Hashable:
        """The key of the step's graph: all that the graph depends on."""
        forms = tuple(None if each is None else (each.probs.size(-1), each.ids is None) for each in q)
        stops = tuple(None if each is None else each.size(0) for each in self._stops)
        keys = tuple(sampler.batch_key for sampler in self._samplers)
        shapes = self._rows, buffers.shape, self._kv_length
        return "verify", self._target.model, keys, shapes, stops, forms, self._taps

    def run(
        self,
        buffers: KVCache,
        block: torch.Tensor,
        input_pos: torch.Tensor,
        q: list[Distribution | None],
        inputs: list[Inputs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Runs the step. Returns the outcomes in the order of `groups`, the states of all rows, and the logits after
        parts of prompts.

        Args:
            buffers: Keys and values of the sequences.
            block: (sequences, rows): a token and its proposal, or a part of a prompt; then -1 as padding.
            input_pos: (sequences,), positions of the first column.
            q: For each group, the distributions of its proposals, rows - 1 rows per text.
            inputs: For each group, its sampler inputs.
        """
        target = self._target
        model, width, vocab_size = target.model, target.verify_width, target.config.padded_vocab_size
        numbers, samplers, stops = self._numbers, self._samplers, self._stops
        kv_length, taps = self._kv_length, self._taps
        reading, last_rows = self._reading, self._last_rows

        def step(
            buffers: KVCache,
            block: torch.Tensor,
            input_pos: torch.Tensor,
            q: list[Distribution | None],
            stops: list[torch.Tensor | None],
            inputs: list[Inputs],
        ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            fed = block.clamp(0, vocab_size - 1)
            result = model.verify(fed, input_pos, buffers, kv_length=kv_length, taps=taps)
            logits, hidden = result if isinstance(result, tuple) else (result, None)
            after_prompt = None
            if reading:
                # The sampler chooses the next token from row 0, as if the last row of the prompt were the only one.
                logits[reading, 0] = after_prompt = logits[reading, last_rows]
                block = block.index_fill(0, torch.tensor(reading, device=block.device), -1)
            outcomes = []
            for i, sampler in enumerate(samplers):
                own, proposed = _of(logits, numbers[i]), _of(block, numbers[i])[:, 1:]
                outcomes.append(outcome(sampler, own, inputs[i], proposed, q[i], stops[i], width))
            packed = [each.flatten() for each in outcomes]
            return packed[0] if len(packed) == 1 else torch.cat(packed), hidden, after_prompt

        key = self.key(buffers, q) if target.runner.compiles else None
        return target.runner.run(key, step, buffers, block, input_pos, q, stops, inputs)


def _of(rows: torch.Tensor, numbers: tuple[int, ...] | None) -> torch.Tensor:
    """The rows of some sequences; None for all."""
    if numbers is None:
        return rows
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return rows[numbers[0] : numbers[-1] + 1]
    return torch.stack([rows[number] for number in numbers])


def _formed(proposal: Proposal, m: int, columns: int | None, vocab_size: int) -> Distribution:
    """The distribution q of a proposal, padded to m rows and `columns` candidates; dense if `columns` is None."""
    tokens, q = proposal
    if q is None:
        ids = tokens.clamp(0, vocab_size - 1).unsqueeze(1)
        q = Distribution(torch.ones(ids.shape, device=ids.device), ids)
    if columns is None and q.ids is not None:
        q = Distribution(q.at(Distribution(torch.empty(q.probs.size(0), vocab_size, device=tokens.device))))
    right = 0 if columns is None else columns - q.probs.size(1)
    below = m - q.probs.size(0)
    if not right and not below:
        return q
    padding = 0, right, 0, below
    return Distribution(F.pad(q.probs, padding), None if q.ids is None else F.pad(q.ids, padding))


def _stacked(each: Sequence[Distribution]) -> Distribution:
    """Stacks the distributions of several texts into a batch."""
    ids = [q.ids for q in each if q.ids is not None]
    return Distribution(torch.stack([q.probs for q in each]), torch.stack(ids) if ids else None)


def prepare(slot: Slot, cache: Slots) -> None:
    """Builds the compiled steps that a text will need, before its prompt is read.

    Raises:
        InputError: The compiler failed.
    """
    target = slot.target
    runner = target.runner
    if not runner.compiles:
        return
    before = len(runner)
    if slot.draft is not None and slot.choose_k.pieces:
        slot.draft.prepare(slot.choose_k.pieces)
    rows, buffers, count = target.verify_width, cache.cache, len(cache.sessions)
    block = torch.full((count, rows), -1, dtype=torch.int64, device=target.device)
    # Write to the end of the buffer, which holds nothing yet.
    input_pos = buffers.slots[buffers.size - rows : buffers.size - rows + 1].expand(count).contiguous()
    nothing = {slot.number: Proposal(block[0, :0])}
    for kv_length in buffers.buckets(target.max_length + rows - 1):
        step = Verification(target, [slot], range(count), rows, kv_length)
        q = [step.form(same, nothing) for same in step.groups]
        if step.key(buffers, q) not in runner:
            inputs = Inputs.stacked([slot.sampler.inputs(target.device, 0, rows)] * count)
            step.run(buffers, block, input_pos, q, [inputs])
    if len(runner) > before:
        for session in cache.sessions:
            session.forget()


def _read(
    order: Sequence[Slot | None],
    sizes: Sequence[int],
    packed: torch.Tensor,
    next_ks: Callable[[list[int]], list[int]],
) -> dict[int, tuple[list[int], int]]:
    """The one device-to-host read of a round: by slot, the tokens to commit and how many were proposed.

    Args:
        order: The text of each outcome; None for an idle slot.
        sizes: Count of numbers in each outcome.
        packed: The outcomes, one after the other.
        next_ks: Maps the outcomes to the k of each text's next round; 0 for an idle slot.
    """
    target = next(slot for slot in order if slot is not None).target
    outcomes = target.placed.agree(packed.flatten(), len(order), next_ks)
    ks = outcomes[len(outcomes) - len(order) :]
    found = {}
    for slot, begin, k in zip(order, accumulate(sizes, initial=0), ks):
        if slot is None:
            continue
        accepted, finite, proposed, ids_exist = outcomes[begin : begin + HEAD]
        tokens = outcomes[begin + HEAD : begin + HEAD + target.verify_width]
        slot.speculative_k = k
        if not ids_exist:
            name = slot.drafter.name if slot.drafter is not None else ""
            slot.error = InputError(
                f"The drafter {name} proposed an id that the target does not have, after position "
                f"{slot.text.input_pos}; ids must be in [0, {target.config.padded_vocab_size}), and -1 only at the end."
            )
        elif not finite:
            slot.target.clear()
            what = "Logits of the target, or probabilities of the drafter, hold NaN or inf"
            if slot.sampler.processes:
                what += ", or bans and the grammar allow no token,"
            slot.error = InputError(
                f"{what} in the block that begins at position {slot.text.input_pos + 1}; check the weights and the "
                "precision" + (", or allow more tokens." if slot.sampler.processes else ".")
            )
        else:
            found[slot.number] = tokens[: accepted + 1], proposed
            if (wanted := slot.sampler.logprobs) is not None:
                numbers = outcomes[begin + HEAD + target.verify_width : begin + slot.size]
                slot.logprobs = wanted.unpack(numbers, tokens[: accepted + 1])
    return found
