"""One text's rounds over a placed target and a drafter: propose, verify, accept, one read.

This is what `decoding.decode` is handed: `Rounds.prefill` and `Rounds.step`. Everything here speaks of tokens and
positions of a single text; batches of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from litspec.decoding import Round
from litspec.errors import InputError
from litspec.sampling import Distribution, Inputs, Position, Sampler, right_prefix

if TYPE_CHECKING:
    from litspec.compiled import Graphs
    from litspec.drafters.base import DraftSession
    from litspec.drafters.speculative_k import SpeculativeK
    from litspec.model import GPT, KVCache

# Rows that a prompt is read in; another size would change the last bits of its keys and values.
PREFILL_CHUNK = 512


class Placed(Protocol):
    """A target whose weights have been placed on one device or many (see `litspec.placement`).

    Attributes:
        model: The model; what it returns lies on `device`, complete, on every rank.
        device: Where tokens and logits are.
        verify_width: W, the rows of every verification.
        draft_model: The model of the draft checkpoint, where there is one.
        graphs: Of compiled steps; None where steps run as they are.
        rank: This process among those that were launched together, 0 for one alone.
        world_size: How many they are.
        is_rank_zero: Whether this process is the one that prints and writes.
    """

    model: GPT
    device: torch.device
    verify_width: int
    draft_model: GPT | None
    graphs: Graphs | None
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

    def agree(self, packed: torch.Tensor, decide: Callable[[list[int]], int]) -> list[int]:
        """Brings the outcome of a round to the host, the only read of the round, the same on every rank.

        Args:
            packed: (n,) int64, this rank's outcome.
            decide: Given the outcome, returns the k of the next round; called on one rank only.

        Returns:
            The deciding rank's outcome with that k appended.
        """
        ...


class TargetSession:
    """One text's hold on the target: its K/V cache and what stands in it.

    Attributes:
        model: The target.
        config: Its LitGPT config.
        cache: Keys and values; positions behind the committed ones hold leftovers that nothing reads.
        device: Where tokens and logits are.
        verify_width: W.
        graphs: Of compiled steps; None where steps run as they are.
        stop_ids: Single tokens that end the text, for drafters that want to cut their proposals.
    """

    def __init__(self, placed: Placed, max_length: int, stop_ids: Sequence[int] = ()) -> None:
        self.placed = placed
        self.model = placed.model
        self.config = placed.model.config
        self.device = placed.device
        self.verify_width = placed.verify_width
        self.graphs: Graphs | None = getattr(placed, "graphs", None)
        self.stop_ids = tuple(stop_ids)
        self.cache: KVCache = placed.model.make_cache(
            max_length, width=self.verify_width, powers_of_two=self.graphs is not None
        )
        if self.graphs is not None:
            self.graphs.adopt(self.cache)
        self.max_length = max_length
        self._tokens: list[int] = []  # the prompt whose keys and values the cache holds
        self._logits: torch.Tensor | None = None  # (1, V), what followed it
        self._block = torch.zeros(1, self.verify_width, dtype=torch.int64, device=self.device)

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
        shared = 0
        while shared < min(len(tokens), len(self._tokens)) and tokens[shared] == self._tokens[shared]:
            shared += 1
        # At least one token is left to run, whose logits are wanted.
        start = 0 if taps else min(shared, len(tokens) - 1) // PREFILL_CHUNK * PREFILL_CHUNK
        self._tokens = []
        idx = self.placed.same(torch.tensor([tokens[start:]], device=self.device))
        result = self.model.prefill(idx, self.cache, start=start, chunk_size=PREFILL_CHUNK, taps=taps)
        logits, hidden = result if taps else (result, None)
        self._tokens, self._logits = tokens, logits[0]
        return self._logits, None if hidden is None else hidden[0]

    def verify(
        self, token: int, input_pos: int, proposal: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs W rows: the last committed token, the proposal, and padding.

        Args:
            token: The last committed token.
            input_pos: Its position.
            proposal: (m,) int64, m < W.

        Returns:
            Logits (W, V), of which row i follows the i-th of these tokens; with taps the states, (W, ...), else None.
        """
        block = self._block
        block.zero_()
        block[0, 0] = token
        block[0, 1 : 1 + proposal.size(0)] = proposal
        result = self.model.verify(
            self.placed.same(block),
            self.cache.slots[input_pos : input_pos + 1],  # a number that is on the device already
            self.cache,
            kv_length=self.cache.bucket(input_pos + self.verify_width),
            taps=taps,
        )
        logits, hidden = result if taps else (result, None)
        return logits[0], None if hidden is None else hidden[0]

    def forget(self) -> None:
        """Empties the cache, zeroed as at birth: after numbers that were none, which masks do not hide."""
        self._tokens, self._logits = [], None
        for buffer in (*self.cache.k, *self.cache.v):
            buffer.zero_()


def outcome(
    sampler: Sampler,
    logits: torch.Tensor,
    position: Position,
    tokens: torch.Tensor,
    q: Distribution | None,
    stops: torch.Tensor | None,
    width: int,
    inputs: Inputs | None = None,
) -> torch.Tensor:
    """Chooses tokens and packs all that the host must know of a round: (3 + W,) int64.

    These are the number accepted, whether all numbers were finite, the number proposed, and the W tokens to choose
    from. It has one size, so that ranks whose drafters differ still understand each other.

    Args:
        sampler: Chooses.
        logits: (m + 1, V), the target's.
        position: Where the first proposal stands.
        tokens: (m,), the proposal, at the end perhaps -1 for nothing.
        q: What they were drawn from.
        stops: (s,), tokens that end the text; None for none.
        width: W.
        inputs: The sampler's, in a compiled graph.
    """
    verified = sampler.verify(logits, position, tokens, q, inputs)
    accepted = verified.accepted
    if tokens.size(0) and stops is not None:
        # What was proposed behind a stop is no part of the text and should not count as accepted.
        accepted = accepted.minimum(right_prefix(~(tokens.unsqueeze(1) == stops).any(1)) + 1)
    head = torch.stack((accepted, verified.finite.long(), (tokens >= 0).sum()))
    return torch.cat((head, F.pad(verified.tokens, (0, width - verified.tokens.size(0)))))


class Rounds:
    """Prefill and rounds of one text.

    Attributes:
        draft_seconds: Host time spent proposing. On a GPU kernels run behind it, so only the sum with the next is sure.
        verify_seconds: Host time spent verifying, reading and telling the drafter.
        speculative_k: The k of the next round.

    Args:
        target: The text's target session.
        draft: The text's draft session, told nothing yet; None to decode plainly.
        taps: Blocks whose states the draft session wants to see.
        sampler: Chooses the tokens.
        choose_k: Chooses k before each round.
    """

    def __init__(
        self,
        target: TargetSession,
        draft: DraftSession | None,
        sampler: Sampler,
        choose_k: SpeculativeK,
        taps: Sequence[int] = (),
    ) -> None:
        self._target = target
        self._draft = draft
        self._taps = tuple(taps) if draft is not None else ()
        self._sampler = sampler
        self._choose_k = choose_k
        self._prompt: list[int] = []
        self._stops = torch.tensor(target.stop_ids, device=target.device) if target.stop_ids else None
        self._last = torch.zeros(1, dtype=torch.int64, device=target.device)
        self._q_like: Distribution | None = None  # of the form that the drafter's distributions have
        self._none = torch.empty(0, dtype=torch.int64, device=target.device)
        self.speculative_k = choose_k.choose()
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> list[int]:
        """Reads the prompt into the target and returns the first token; the drafter has its turn later."""
        self._prompt = list(prompt)
        logits, hidden = self._target.prefill(self._prompt, self._taps)
        position = len(self._prompt)
        packed = outcome(self._sampler, logits, position, self._none, None, None, self._target.verify_width)
        tokens, _ = self._read(packed, position, lambda accepted, proposed: self.speculative_k)
        if self._draft is not None:
            shifted = None if hidden is None else F.pad(hidden, (0, 0, 1, 0))
            self._draft.extend(self._prompt, 0, None if shifted is None else shifted[:-1])
            self._draft.extend(tokens, position, None if shifted is None else shifted[-1:])
        return tokens

    @torch.inference_mode()
    def step(self, token: Sequence[int], input_pos: int, k: int) -> Round:
        """One round, see `decoding.decode`."""
        began = time.perf_counter()
        if self._target.graphs is not None:
            self._target.graphs.begin_round()
        last = token[0]
        k = min(k, self._target.verify_width - 1)
        proposal, q = self._none, None
        if self._draft is not None and k > 0:
            proposal, q = self._draft.propose(last, input_pos, k)
            # A drafter of the caller's may propose more than it may, or ids of another integer type.
            proposal = proposal[:k].to(self._target.device, torch.int64)
            q = None if q is None else q.first(k)
        drafted = time.perf_counter()

        packed, hidden = self.verify(last, input_pos, proposal, q)

        def next_k(accepted: int, proposed: int) -> int:
            seconds = time.perf_counter() - began
            self._choose_k.observe(proposed=proposed, accepted=accepted, seconds=seconds, limit=k)
            return self._choose_k.choose()

        tokens, proposed = self._read(packed, input_pos + 1, next_k)
        if self._draft is not None:
            self._draft.extend(tokens, input_pos + 1, None if hidden is None else hidden[: len(tokens)])
        self.draft_seconds += drafted - began
        self.verify_seconds += time.perf_counter() - drafted
        return Round(tokens, proposed)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds the graphs that the text will need, where steps are compiled; before the prefill.

        Raises:
            InputError: The drafter wants what a graph does not give, or the compiler failed.
        """
        target = self._target
        if target.graphs is None:
            return
        if self._taps:
            raise InputError(
                f"The drafter wants to see the target's states (taps = {self._taps}), which compiled graphs do not "
                "hand out; load without compile."
            )
        before = len(target.graphs)
        if hasattr(self._draft, "warm_up") and self._choose_k.pieces:
            self._draft.warm_up(self._choose_k.pieces)
            self._q_like = self._draft.q_like()
        for kv_length in target.cache.buckets(target.max_length + target.verify_width - 1):
            if self._key(kv_length, self._q_like) not in target.graphs:
                # In the last slots, before anything stands in the cache that counts.
                self._verify_compiled(0, target.cache.size - target.verify_width, self._none, None, kv_length)
        if len(target.graphs) > before:
            target.forget()

    def verify(
        self, last: int, input_pos: int, proposal: torch.Tensor, q: Distribution | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs a block and chooses from it: `outcome`, and the states of its rows where the drafter wants them."""
        target = self._target
        if target.graphs is not None:
            return self._verify_compiled(last, input_pos, proposal, q), None
        logits, hidden = target.verify(last, input_pos, proposal, self._taps)
        logits = logits[: proposal.size(0) + 1]
        width = target.verify_width
        return outcome(self._sampler, logits, input_pos + 1, proposal, q, self._stops, width), hidden

    def _key(self, kv_length: int, q: Distribution | None) -> Hashable:
        target = self._target
        form = None if q is None else (q.probs.size(1), q.ids is None)
        shapes = target.verify_width, target.cache.size, kv_length, len(target.stop_ids), form
        return "verify", target.model, self._sampler.kind, shapes

    def _verify_compiled(
        self, last: int, input_pos: int, proposal: torch.Tensor, q: Distribution | None, kv_length: int | None = None
    ) -> torch.Tensor:
        """`outcome` of a round in one graph; its shapes do not depend on how many tokens were proposed."""
        target, sampler, stops = self._target, self._sampler, self._stops
        model, width, cache = target.model, target.verify_width, target.cache
        missing = width - 1 - proposal.size(0)
        proposal = F.pad(proposal, (0, missing), value=-1)
        if q is None and self._q_like is not None and missing == width - 1:
            q = self._q_like
        if q is not None:
            rows = (0, 0, 0, width - 1 - q.probs.size(0))
            q = Distribution(F.pad(q.probs, rows), None if q.ids is None else F.pad(q.ids, rows))
        kv_length = kv_length or cache.bucket(input_pos + width)

        def make() -> Callable[..., torch.Tensor]:
            def verify(
                cache: KVCache,
                last: torch.Tensor,
                input_pos: torch.Tensor,
                tokens: torch.Tensor,
                q: Distribution | None,
                stops: torch.Tensor | None,
                inputs: Inputs,
            ) -> torch.Tensor:
                block = torch.cat((last, tokens.clamp_min(0))).view(1, width)
                logits = model.verify(block, input_pos, cache, kv_length=kv_length)[0]
                return outcome(sampler, logits, input_pos + 1, tokens, q, stops, width, inputs)

            return verify

        vocab_size = target.config.padded_vocab_size
        columns = min(sampler.sampling.top_k or vocab_size, vocab_size)
        inputs = sampler.inputs(target.device, rows=width, columns=columns)
        position = cache.slots[input_pos : input_pos + 1]
        args = (cache, self._last.fill_(last), position, proposal, q, stops, inputs)
        return target.graphs.call(self._key(kv_length, q), make, *args)

    def _read(self, packed: torch.Tensor, position: int, next_k: Callable[[int, int], int]) -> tuple[list[int], int]:
        """The one device-to-host read of a round: the tokens to commit and the number proposed; sets the next k."""
        target = self._target
        accepted, finite, proposed, *tokens, k = target.placed.agree(packed, lambda outcome: next_k(*outcome[:3:2]))
        if not finite:
            target.forget()
            raise InputError(
                f"Logits of the target, or probabilities of the drafter, hold NaN or inf in the block that begins at "
                f"position {position}; check the weights and the precision."
            )
        self.speculative_k = k
        return tokens[: accepted + 1], proposed
