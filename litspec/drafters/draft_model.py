"""A smaller model drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from litspec.drafters.autoregressive import CompiledDraft, draft_tokens, step_bytes
from litspec.drafters.base import Proposal
from litspec.model import GPT, KVCache
from litspec.sampling import Distribution, Sampler

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.compiled import Graphs
    from litspec.rounds import TargetSession

# Rows that a prompt is read in; a text's drafts then do not depend on whether its prompt had been read before.
PREFILL_CHUNK = 512


class DraftModel:
    """Drafts with a GPT of its own, see `drafters.Drafter`.

    Attributes:
        notes: What is worth knowing about it, as sentences.

    Args:
        model: The draft model, in any precision, on any one device.
        target_config: The target's.
        max_k: Most proposals a round.
        vocab_size: Ids below it may be proposed; None: those that both models have.
        excluded: Ids that must never be proposed.
        graphs: Of compiled steps; None to run as it is.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: GPT,
        *,
        target_config: Config,
        max_k: int,
        vocab_size: int | None = None,
        excluded: Sequence[int] = (),
        graphs: Graphs | None = None,
    ) -> None:
        self.model = model
        self.graphs = graphs
        self.device = model.lm_head.weight.device
        self.max_k = max_k
        self.step_bytes = step_bytes(model)
        shared = min(model.config.padded_vocab_size, target_config.padded_vocab_size)
        self.vocab_size = shared if vocab_size is None else min(shared, vocab_size)
        never = [i for i in excluded if i < self.vocab_size]
        self.excluded = tuple(never)
        self.never = torch.tensor(never, dtype=torch.int64, device=self.device) if never else None
        self.notes: list[str] = []
        if model.config.block_size < target_config.block_size:
            self.notes.append(
                f"The draft model sees {model.config.block_size} tokens, the target {target_config.block_size}; beyond "
                f"the first {model.config.block_size} tokens of a text nothing is drafted."
            )
        self._idle: tuple[KVCache, list[int]] | None = None  # a cache to use again, and the prompt that stands in it
        self._lock = threading.Lock()

    def compiled(self, graphs: Graphs) -> DraftModel:
        """The same with compiled steps."""
        other = copy.copy(self)
        other.graphs, other._idle, other._lock = graphs, None, threading.Lock()
        return other

    def begin(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftModelSession:
        return DraftModelSession(self, target, max_length, sampler)

    def take(self, max_length: int) -> tuple[KVCache, list[int]]:
        """A cache that no other session holds, and the tokens at its beginning that were read as a prompt."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and idle[0].max_seq_length >= max_length:
            return idle
        if self.graphs is None:
            return self.model.make_cache(max_length, width=1), []
        # A graph may draft more than what was asked for.
        cache = self.model.make_cache(max_length, width=self.max_k + 1, powers_of_two=True)
        self.graphs.adopt(cache)
        return cache, []

    def reserve(self, max_length: int) -> None:
        """Makes room for texts of up to `max_length` tokens."""
        self.give_back(*self.take(min(max_length, self.model.config.block_size)))

    def give_back(self, cache: KVCache, prompt: list[int]) -> None:
        with self._lock:
            self._idle = cache, prompt

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (1, V) of ids that may be proposed, (1, v)."""
        if logits.size(1) > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        if self.never is not None:
            logits = logits.index_fill(1, self.never, float("-inf"))
        return logits


class DraftModelSession:
    """One text, see `drafters.DraftSession`.

    Refused drafts are undone by doing nothing: what stands in the cache behind the committed tokens is masked until it
    is overwritten. Nothing runs before the first proposal is asked for, and nothing runs only to fill the cache.
    """

    def __init__(self, drafter: DraftModel, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._device = drafter.device
        self._target_device = target.device
        self._target_vocab_size = target.config.padded_vocab_size
        self._sampler = sampler if drafter.device == target.device else sampler.on(drafter.device)
        self._compiled: CompiledDraft | None = None
        if drafter.graphs is not None:
            self._compiled = CompiledDraft(
                drafter.graphs,
                drafter.model,
                self._sampler,
                vocab_size=drafter.vocab_size,
                allowed=drafter.allowed,
                name=drafter.excluded,
            )
        self._limit = min(max_length, drafter.model.config.block_size)
        self._cache: KVCache | None = None
        self._tokens: list[int] = []  # the committed ones
        self._prompt_size = 0
        self._filled = 0  # so many of their keys and values stand in the cache
        self._drafted = 0  # positions behind `_filled` that hold the last proposal's, should it be accepted

    def extend(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        """Notes tokens. The first call after a proposal tells its outcome: accepted ones, then one of the target's."""
        if not self._tokens:
            self._prompt_size = len(tokens)
        # Ids that only the target has stand for nothing in the draft's embedding; any other will do.
        size = self._drafter.model.config.padded_vocab_size
        self._tokens += [token if token < size else 0 for token in tokens]
        # Of the last proposal those stay that were told again, without the target's own token behind them.
        self._filled += min(len(tokens) - 1, self._drafted)
        self._drafted = 0

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        k = min(k, self._drafter.max_k, self._limit - input_pos)
        if k < 1:
            return Proposal(torch.empty(0, dtype=torch.int64, device=self._target_device))
        cache = self._fill_prompt()
        # The first step takes the last two tokens, or more: after a full acceptance the last proposal has not been run
        # yet, and a step of two rows costs what one of one row costs.
        first = min(self._filled, input_pos - 1)
        if self._compiled is not None:
            if first < input_pos - 1:
                missed = torch.tensor([self._tokens[first : input_pos - 1]], device=self._device)
                self._model.prefill(missed, cache, start=first, chunk_size=PREFILL_CHUNK)
            rows = torch.tensor(self._tokens[input_pos - 1 : input_pos + 1], device=self._device)
            tokens, q = self._compiled.propose(rows, input_pos - 1, k, cache)
        else:
            rows = torch.tensor([self._tokens[first : input_pos + 1]], device=self._device)
            if rows.size(1) == 2:
                logits = self._run(rows, first)
            else:
                logits = self._model.prefill(rows, cache, start=first, chunk_size=PREFILL_CHUNK)[0]
                logits = self._drafter.allowed(logits)
            tokens, q = draft_tokens(self._sampler, logits, self._run, input_pos + 1, k)
        self._filled, self._drafted = input_pos + 1, k - 1
        return self._for_target(tokens, q)

    def warm_up(self, pieces: Sequence[int]) -> None:
        """Builds the graphs that proposals will need, where steps are compiled; see `SpeculativeK.pieces`."""
        if self._compiled is not None:
            cache, known = self._drafter.take(self._limit)
            built = self._compiled.warm_up(2, cache, pieces, self._limit)
            self._drafter.give_back(cache, [] if built else known)

    def q_like(self) -> Distribution | None:
        """No rows of the form that a proposal's distributions have, where steps are compiled."""
        if self._compiled is None or (q := self._compiled.q_like()) is None:
            return None
        return self._for_target(q.probs[:, 0], q).q

    def _for_target(self, tokens: torch.Tensor, q: Distribution | None) -> Proposal:
        """On the target's device, over its vocabulary."""
        if q is not None:
            probs, ids = q.probs.to(self._target_device), None if q.ids is None else q.ids.to(self._target_device)
            if ids is None:
                probs = F.pad(probs, (0, self._target_vocab_size - probs.size(1)))
            q = Distribution(probs, ids)
        return Proposal(tokens.to(self._target_device), q)

    def close(self) -> None:
        """The text has ended; the next one may have the cache, and need not read the same prompt again."""
        if self._cache is not None:
            self._drafter.give_back(self._cache, self._tokens[: self._prompt_size - 1])
            self._cache = None

    def _fill_prompt(self) -> KVCache:
        """Reads the prompt but for its last token, by itself, so that its bits do not depend on what followed it."""
        if self._cache is None:
            self._cache, known = self._drafter.take(self._limit)
            prompt = self._tokens[: self._prompt_size - 1]
            if known != prompt:
                shared = 0
                while shared < min(len(known), len(prompt)) and known[shared] == prompt[shared]:
                    shared += 1
                # Up to a border between chunks they were cut the same way.
                start = shared // PREFILL_CHUNK * PREFILL_CHUNK
                if start < len(prompt):
                    rows = torch.tensor([prompt[start:]], device=self._device)
                    self._model.prefill(rows, self._cache, start=start, chunk_size=PREFILL_CHUNK)
            self._filled = len(prompt)
        return self._cache

    def _run(self, rows: torch.Tensor, input_pos: int) -> torch.Tensor:
        """Logits after the last of some rows, (1, v)."""
        cache = self._cache
        rows = rows.view(1, -1)
        kv_length = cache.bucket(input_pos + rows.size(1))
        # The position is a slice of a tensor that is there already: no copy to the device.
        position = cache.slots[input_pos : input_pos + 1]
        return self._drafter.allowed(self._model.verify(rows, position, cache, kv_length=kv_length, last=1)[0])
