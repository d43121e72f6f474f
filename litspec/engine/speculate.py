"""One round for all running texts: propose, verify, accept, and one read to the host.

`litspec.reference` has the same algorithm for one text in its shortest form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from litspec.drafters.base import DraftSession, Proposal
from litspec.engine.sequence import Block, Text
from litspec.engine.target import Slots, TargetSession
from litspec.errors import InputError
from litspec.sampling import Choosing, Distribution, Inputs, Sampler, right_prefix

if TYPE_CHECKING:
    from litspec.drafters.speculative_k import SpeculativeK
    from litspec.model import KVCache


@dataclass
class Slot:
    """A text in a slot.

    Attributes:
        text: Its budget and stops.
        target: Its hold on the target.
        draft: Its draft session; None to decode plainly.
        sampler: Chooses its tokens.
        choose_k: Chooses the k of each round.
        name: Of the drafter, for sentences.
        taps: Blocks of the target whose states the draft session wants to see.
        number: Of the slot.
        speculative_k: The k of the next round.
        draft_seconds: Host time spent proposing. On a GPU kernels run behind it, so only the sum with the next is sure.
        verify_seconds: Host time spent verifying, reading and committing.
        error: Why the text cannot go on: its drafter broke the protocol, or numbers are not finite.
        stops: (s,), tokens that end the text; None for none.
    """

    text: Text
    target: TargetSession
    draft: DraftSession | None
    sampler: Sampler
    choose_k: SpeculativeK
    name: str = ""
    taps: tuple[int, ...] = ()
    number: int = 0
    speculative_k: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    error: InputError | None = None
    stops: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.target.stop_ids:
            self.stops = torch.tensor(self.target.stop_ids, device=self.target.device)

    def commit(self, tokens: list[int], proposed: int = 0) -> Block:
        """Takes what a round brought, see `Text.commit`."""
        self.sampler.commit(tokens)
        return self.text.commit(tokens, proposed)


# Numbers of an outcome before its tokens.
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
    """Chooses the tokens of one text and packs all that the host must know: (4 + W,) int64.

    These are the number accepted, whether all numbers were finite, the number proposed, whether all ids exist, and W
    tokens to choose from.

    Args:
        sampler: Chooses.
        logits: (rows, V), the target's.
        inputs: The sampler's.
        tokens: (rows - 1,), the proposal, at the end perhaps -1: nothing was proposed there.
        q: What they were drawn from.
        stops: (s,), tokens that end the text; None for none.
        width: W. The outcome has one size, so that ranks whose drafters differ still understand each other.
    """
    verified = sampler.verify(logits, inputs, tokens.clamp(max=logits.size(1) - 1), q)
    accepted = verified.accepted
    if tokens.size(0) and stops is not None:
        # What was proposed behind a stop is no part of the text and should not count as accepted.
        accepted = accepted.minimum(right_prefix(~(tokens.unsqueeze(1) == stops).any(1)) + 1)
    given = tokens >= 0
    # Of negative numbers only -1 stands for nothing, and behind it nothing else may come.
    ids_exist = ((tokens < logits.size(1)) & (tokens >= -1)).all() & (right_prefix(given) == given.sum())
    head = torch.stack((accepted, verified.finite.long(), given.sum(), ids_exist.long()))
    return torch.cat((head, F.pad(verified.tokens, (0, width - verified.tokens.size(0)))))


def prefill(slot: Slot, prompt: Sequence[int]) -> list[int]:
    """Reads the prompt of a text into its slot and returns the first token."""
    target = slot.target
    logits, hidden = target.prefill(prompt, slot.taps)
    position = len(prompt)
    none = torch.empty(0, dtype=torch.int64, device=target.device)
    inputs = slot.sampler.inputs(target.device, position)
    packed = outcome(slot.sampler, logits, inputs, none, None, None, target.verify_width)
    found = _read([slot], packed, lambda _: [slot.choose_k.choose()])
    if slot.error is not None:
        raise slot.error
    tokens, _ = found[slot.number]
    if slot.draft is not None:
        # Row j of what a drafter sees is the state that predicted token j, the one before it.
        states = None if hidden is None else F.pad(hidden, (0, 0, 1, 0))
        slot.draft.commit(list(prompt), 0, None if states is None else states[:-1])
        slot.draft.commit(list(tokens), position, None if states is None else states[-1:])
    return tokens


def run_round(slots: Sequence[Slot], cache: Slots) -> list[tuple[Slot, list[int], int]]:
    """One round of some texts.

    Args:
        slots: The texts, in the order of their slots' numbers.
        cache: The slots.

    Returns:
        The texts that go on; for each the tokens to commit, which are the accepted proposals and one token of the
        target's own, and how many were proposed. The others have an `error`.
    """
    cache.placed.runner.begin_round()
    began = time.perf_counter()
    proposals = []
    for slot in slots:
        try:
            proposals.append(propose(slot))
        except InputError as error:
            slot.error = error
    slots = [slot for slot in slots if slot.error is None]
    if not slots:
        return []
    drafted = time.perf_counter()

    packed, hidden = verify(slots, proposals, cache)

    def next_ks(outcomes: list[int]) -> list[int]:
        for i, slot in enumerate(slots):
            accepted, _, proposed, *_ = outcomes[i * (HEAD + slot.target.verify_width) :]
            slot.choose_k.observe(proposed=proposed, accepted=accepted)
        return [slot.choose_k.choose() for slot in slots]

    found = _read(slots, packed, next_ks)
    for i, slot in enumerate(slots):
        if slot.draft is not None and slot.error is None:
            tokens = found[slot.number][0]
            states = hidden[i]
            states = None if states is None else states[: len(tokens)]
            # A copy: what a drafter does with it cannot reach the text.
            slot.draft.commit(list(tokens), slot.text.input_pos + 1, states)
        slot.draft_seconds += drafted - began
        slot.verify_seconds += time.perf_counter() - drafted
    return [(slot, *found[slot.number]) for slot in slots if slot.error is None]


def propose(slot: Slot) -> Proposal:
    """What the drafter of a text proposes, at most as many tokens as the round can use."""
    target = slot.target
    # The round ends with a token of the target's own, so more proposals than this could never be used.
    k = min(slot.speculative_k, slot.text.most_proposals, target.verify_width - 1)
    slot.sampler.start_round(slot.text.input_pos + 1)
    if slot.draft is None or k < 1:
        return Proposal(torch.empty(0, dtype=torch.int64, device=target.device))
    tokens, q = checked(slot.draft.propose(slot.text.last, slot.text.input_pos, k), slot.name, target)
    tokens = tokens[:k]
    return Proposal(tokens, None if q is None else q.first(tokens.size(0)))


def checked(proposal: Proposal, drafter: str, target: TargetSession) -> Proposal:
    """The proposal on the target's device, where it has the form that the protocol asks for.

    Ids are not looked at, since that would read them to the host; `outcome` tells whether they exist.

    Raises:
        InputError: Names the drafter and what it broke.
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


def verify(
    slots: Sequence[Slot], proposals: Sequence[Proposal], cache: Slots
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Runs the target over all proposals and chooses.

    Returns:
        The outcome of each text, one after the other, and for each what the taps of its drafter saw in its rows, None
        where it has none.
    """
    rows = slots[0].target.rows_for(max(proposal.tokens.size(0) for proposal in proposals))
    packed: list[torch.Tensor] = []
    hidden: list[torch.Tensor | None] = []
    for first, members in cache.groups([slot.number for slot in slots], rows):
        chosen = [i for i, slot in enumerate(slots) if first <= slot.number < first + members]
        found, states = _verify_group(
            [slots[i] for i in chosen], [proposals[i] for i in chosen], cache, first, members, rows
        )
        packed.append(found)
        hidden += states
    return packed[0] if len(packed) == 1 else torch.cat(packed), hidden


def _verify_group(
    slots: Sequence[Slot], proposals: Sequence[Proposal], cache: Slots, first: int, members: int, rows: int
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """`verify` for texts among `members` neighbouring slots from `first` on, in one forward."""
    target = slots[0].target
    placed, device = target.placed, target.device
    buffers = cache.buffers(first, members)
    block = torch.full((members, rows), -1, dtype=torch.int64, device=device)
    # An idle slot runs along in the last places of its buffer, where no text ever stands.
    places = [buffers.size - rows] * members
    for slot, proposal in zip(slots, proposals):
        at = slot.number - first
        block[at, 0] = slot.text.last
        block[at, 1 : 1 + proposal.tokens.size(0)] = proposal.tokens
        places[at] = slot.text.input_pos
    # Of one text: a number that is on the device already.
    input_pos = buffers.slots[places[0] :][:1] if members == 1 else torch.tensor(places, device=device)
    kv_length = buffers.bucket(max(slot.text.input_pos for slot in slots) + rows)
    step = Verification(target, tuple(slot.number - first for slot in slots), rows, kv_length, slots)
    q = [step.form(proposal.q, proposal.tokens, slot.sampler) for slot, proposal in zip(slots, proposals)]
    inputs = [slot.sampler.inputs(device, slot.text.input_pos + 1, rows) for slot in slots]
    packed, hidden = step.run(buffers, placed.same(block), input_pos, q, inputs)
    return packed, [step.states(hidden, slot.number - first, slot.taps) for slot in slots]


class Verification:
    """The step of a verification: what is fixed in it, and so may be compiled into it.

    Args:
        target: Any session of the target.
        numbers: Which of the sequences that run are texts.
        rows: Rows of each sequence.
        kv_length: Keys and values to read.
        slots: The texts.
    """

    def __init__(
        self, target: TargetSession, numbers: tuple[int, ...], rows: int, kv_length: int, slots: Sequence[Slot]
    ) -> None:
        self._target = target
        self._numbers = numbers
        self._rows = rows
        self._kv_length = kv_length
        self._samplers = [slot.sampler for slot in slots]
        self._stops = [slot.stops for slot in slots]
        self._taps = tuple(dict.fromkeys(tap for slot in slots for tap in slot.taps))

    def form(self, q: Distribution | None, tokens: torch.Tensor, sampler: Sampler) -> Distribution | None:
        """The proposal's distributions with a row for each proposal that there might be; None for who asks for none.

        A graph is built for one form, that of the sampler's own distributions; into it is brought what fits, so a token
        that was not drawn becomes a certain one. What has more candidates gets the one other form: a column per id.
        """
        if isinstance(sampler, Choosing):
            return None
        if self._target.runner.compiles:
            vocab_size = self._target.config.padded_vocab_size
            columns = sampler.columns(vocab_size)
            if q is None:
                ids = tokens.clamp(0, vocab_size - 1).unsqueeze(1)
                q = Distribution(torch.ones(ids.shape, device=ids.device), ids)
            if columns < vocab_size and q.ids is not None and q.probs.size(1) <= columns:
                if (more := columns - q.probs.size(1)) > 0:
                    q = Distribution(F.pad(q.probs, (0, more)), F.pad(q.ids, (0, more)))
            elif q.ids is not None:
                q = Distribution(q.at(Distribution(torch.empty(tokens.size(0), vocab_size, device=tokens.device))))
        missing = self._rows - 1 - tokens.size(0)
        if q is None or missing == 0:
            return q
        rows = (0, 0, 0, missing)
        return Distribution(F.pad(q.probs, rows), None if q.ids is None else F.pad(q.ids, rows))

    def states(self, hidden: torch.Tensor | None, number: int, taps: tuple[int, ...]) -> torch.Tensor | None:
        """What the taps of one text saw, (rows, len(taps) * C), of what those of all texts saw; None without taps."""
        if hidden is None or not taps:
            return None
        if taps == self._taps:
            return hidden[number]
        parts = hidden[number].chunk(len(self._taps), dim=-1)
        return torch.cat([parts[self._taps.index(tap)] for tap in taps], dim=-1)

    def key(self, buffers: KVCache, q: Sequence[Distribution | None]) -> Hashable:
        """Names all that the step depends on."""
        forms = tuple(None if each is None else (each.probs.size(1), each.ids is None) for each in q)
        stops = tuple(None if each is None else each.size(0) for each in self._stops)
        kinds = tuple(sampler.kind for sampler in self._samplers)
        shapes = self._numbers, self._rows, buffers.shape, self._kv_length
        return "verify", self._target.model, kinds, shapes, stops, forms, self._taps

    def run(
        self,
        buffers: KVCache,
        block: torch.Tensor,
        input_pos: torch.Tensor,
        q: list[Distribution | None],
        inputs: list[Inputs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outcomes of the texts, one after the other, and the states of all rows.

        Args:
            buffers: Keys and values of the sequences.
            block: (sequences, rows): a token, its proposal, and -1 where nothing was proposed.
            input_pos: (sequences,), positions of the first column.
            q: For each text what its proposal was drawn from, rows - 1 rows.
            inputs: For each text its sampler's.
        """
        target = self._target
        model, width, vocab_size = target.model, target.verify_width, target.config.padded_vocab_size
        numbers, samplers, stops = self._numbers, self._samplers, self._stops
        kv_length, taps = self._kv_length, self._taps

        def step(
            buffers: KVCache,
            block: torch.Tensor,
            input_pos: torch.Tensor,
            q: list[Distribution | None],
            stops: list[torch.Tensor | None],
            inputs: list[Inputs],
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            fed = block.clamp(0, vocab_size - 1)
            result = model.verify(fed, input_pos, buffers, kv_length=kv_length, taps=taps)
            logits, hidden = result if taps else (result, None)
            outcomes = [
                outcome(sampler, logits[i], inputs[j], block[i, 1:], q[j], stops[j], width)
                for j, (i, sampler) in enumerate(zip(numbers, samplers))
            ]
            return outcomes[0] if len(outcomes) == 1 else torch.cat(outcomes), hidden

        key = self.key(buffers, q) if target.runner.compiles else None
        return target.runner.run(key, step, buffers, block, input_pos, q, stops, inputs)


def prepare(slot: Slot, cache: Slots) -> None:
    """Builds the compiled steps that a text will need; before its prompt is read.

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
    rows = target.verify_width
    buffers = cache.buffers(slot.number, 1)
    block = torch.full((1, rows), -1, dtype=torch.int64, device=target.device)
    none = block[0, :0]
    # In the last places of the buffer, before anything that counts stands there.
    input_pos = buffers.slots[buffers.size - rows : buffers.size - rows + 1]
    for kv_length in buffers.buckets(target.max_length + rows - 1):
        step = Verification(target, (0,), rows, kv_length, [slot])
        q = [step.form(None, none, slot.sampler)]
        if step.key(buffers, q) not in runner:
            step.run(buffers, block, input_pos, q, [slot.sampler.inputs(target.device, 0, rows)])
    if len(runner) > before:
        target.forget()


def _read(
    slots: Sequence[Slot], packed: torch.Tensor, next_ks: Callable[[list[int]], list[int]]
) -> dict[int, tuple[list[int], int]]:
    """The one device-to-host read of a round: by slot, the tokens to commit and how many were proposed."""
    target = slots[0].target
    outcomes = target.placed.agree(packed, len(slots), next_ks)
    size = HEAD + target.verify_width
    found = {}
    for i, slot in enumerate(slots):
        accepted, finite, proposed, ids_exist, *tokens = outcomes[i * size : (i + 1) * size]
        slot.speculative_k = outcomes[len(slots) * size + i]
        if not ids_exist:
            slot.error = InputError(
                f"The drafter {slot.name} proposed an id that the target does not have, behind position "
                f"{slot.text.input_pos}; ids must be in [0, {target.config.padded_vocab_size}), and -1 only at the end."
            )
        elif not finite:
            slot.target.clear()
            slot.error = InputError(
                "Logits of the target, or probabilities of the drafter, hold NaN or inf in the block that begins at "
                f"position {slot.text.input_pos + 1}; check the weights and the precision."
            )
        else:
            found[slot.number] = tokens[: accepted + 1], proposed
    return found
