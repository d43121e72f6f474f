"""A smaller model drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from litspec.drafters.autoregressive import ModelDrafts, step_bytes
from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.engine.runner import Runner
from litspec.model import GPT, KVCache
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.engine.target import TargetSession

# Rows that a prompt is read in; a text's drafts then do not depend on whether its prompt had been read before.
PREFILL_CHUNK = 512


class DraftModel(Drafter):
    """Drafts with a GPT of its own, see `drafters.Drafter`.

    Args:
        model: The draft model, in any precision, on any one device.
        target_config: The target's.
        max_k: Most proposals a round.
        vocab_size: Ids below it may be proposed; None: those that both models have.
        excluded: Ids that must never be proposed.
    """

    def __init__(
        self,
        model: GPT,
        *,
        target_config: Config,
        max_k: int,
        vocab_size: int | None = None,
        excluded: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.device = model.lm_head.weight.device
        self.max_k = max_k
        self._step_bytes = step_bytes(model)
        shared = min(model.config.padded_vocab_size, target_config.padded_vocab_size)
        self.vocab_size = shared if vocab_size is None else min(shared, vocab_size)
        never = [i for i in excluded if i < self.vocab_size]
        self.excluded = tuple(never)
        self.never = torch.tensor(never, dtype=torch.int64, device=self.device) if never else None
        self.notes = []
        if model.config.block_size < target_config.block_size:
            self.notes.append(
                f"The draft model sees {model.config.block_size} tokens, the target {target_config.block_size}; beyond "
                f"the first {model.config.block_size} tokens of a text nothing is drafted."
            )
        # What made a cache, the cache, to be used again, and the prompt that stands in it.
        self._idle: tuple[Runner, KVCache, list[int]] | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "draft_model"

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k * self.model.config.n_layer)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftModelSession:
        return DraftModelSession(self, target, max_length, sampler)

    def take(self, max_length: int, runner: Runner) -> tuple[KVCache, list[int]]:
        """A cache that no other session holds, and the tokens at its beginning that were read as a prompt."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and idle[0] is runner and idle[1].max_seq_length >= max_length:
            return idle[1:]
        del idle
        # A step may draft more than what was asked for.
        return runner.make_cache(self.model, max_length, width=self.max_k + 1), []

    def give_back(self, runner: Runner, cache: KVCache, prompt: list[int]) -> None:
        """Keeps a cache for the next session."""
        with self._lock:
            self._idle = runner, cache, prompt

    def reserve(self, max_length: int, runner: Runner) -> None:
        self.give_back(runner, *self.take(min(max_length, self.model.config.block_size), runner))

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (1, V) of ids that may be proposed, (1, v)."""
        if logits.size(1) > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        if self.never is not None:
            logits = logits.index_fill(1, self.never, float("-inf"))
        return logits


class DraftModelSession(DraftSession):
    """One text, see `drafters.DraftSession`.

    Refused drafts are undone by doing nothing: what stands in the cache behind the committed tokens is masked until it
    is overwritten. Nothing runs before a proposal is asked for; what plain rounds added until then is read at once.
    """

    def __init__(self, drafter: DraftModel, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._device = drafter.device
        self._runner = target.runner
        self._target_device = target.device
        name = drafter.vocab_size, drafter.excluded
        self._drafts = ModelDrafts(target.runner, drafter.model, sampler, allowed=drafter.allowed, name=name)
        self._limit = min(max_length, drafter.model.config.block_size)
        self._cache: KVCache | None = None
        self._tokens: list[int] = []  # the committed ones
        self._prompt_size = 0
        self._filled = 0  # so many of their keys and values stand in the cache
        self._drafted = 0  # positions behind `_filled` that hold the last proposal's, should it be accepted

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
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
        # The first step takes the last two tokens: after a full acceptance the last proposal has not been run yet, and
        # a step of two rows costs what one of one row costs. What was missed before that is read first.
        first = min(self._filled, input_pos - 1)
        if first < input_pos - 1:
            missed = torch.tensor([self._tokens[first : input_pos - 1]], device=self._device)
            self._model.prefill(missed, cache, start=first, chunk_size=PREFILL_CHUNK)
        rows = torch.tensor(self._tokens[max(0, input_pos - 1) : input_pos + 1], device=self._device)
        proposal = self._drafts.propose(rows, input_pos + 1 - rows.size(0), k, cache)
        self._filled, self._drafted = input_pos + 1, k - 1
        return proposal

    def prepare(self, sizes: Sequence[int]) -> None:
        cache, known = self._drafter.take(self._limit, self._runner)
        built = self._drafts.prepare(2, cache, sizes, self._limit)
        self._drafter.give_back(self._runner, cache, [] if built else known)

    def close(self) -> None:
        """The text has ended; the next one may have the cache, and need not read the same prompt again."""
        if self._cache is not None:
            self._drafter.give_back(self._runner, self._cache, self._tokens[: self._prompt_size - 1])
            self._cache = None

    def _fill_prompt(self) -> KVCache:
        """Reads the prompt but for its last token, by itself, so that its bits do not depend on what followed it."""
        if self._cache is None:
            self._cache, known = self._drafter.take(self._limit, self._runner)
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
