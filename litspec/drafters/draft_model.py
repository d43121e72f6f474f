"""Drafting with a smaller model (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from litspec.drafters.autoregressive import Asked, ModelDrafts, exact_rows, step_bytes
from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.speculative_k import PIECES
from litspec.model import GPT, KVCache
from litspec.model.kv_cache import kv_bucket
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.engine.target import TargetSession

# Tokens of a prompt that are read in one forward. Fixed chunks give a prompt the same bits when a prefix is reused.
PREFILL_CHUNK = 512


@dataclass
class Pool:
    """The draft model's keys and values for all slots of an engine.

    Attributes:
        cache: Keys and values, (B, G, S, D) per layer.
        prompts: By slot, the prompt tokens at its beginning.
    """

    cache: KVCache
    prompts: list[list[int]]

    def slot(self, number: int) -> KVCache:
        """Keys and values of one slot."""
        return self.cache.sequences(number, number + 1)

    def shared(self, number: int, prompt: list[int]) -> int:
        """Tokens at the beginning of a prompt that a slot holds already: the whole prompt, or whole chunks."""
        known = self.prompts[number]
        if known == prompt:
            return len(prompt)
        end = min(len(known), len(prompt)) // PREFILL_CHUNK * PREFILL_CHUNK
        while known[:end] != prompt[:end]:
            end -= PREFILL_CHUNK
        return end


class DraftModel(Drafter):
    """Drafts with a second, smaller model, see `drafters.Drafter`.

    Args:
        model: The draft model, in any precision, on a single device.
        target_config: The target's config.
        max_k: Most proposals per round.
        vocab_size: Only ids below it are proposed; None for all ids that both models have.
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
                f"The draft model has a context of {model.config.block_size} tokens, the target "
                f"{target_config.block_size}; after {model.config.block_size} tokens of a text, nothing is drafted."
            )
        # Twice: a step may draft more than k tokens, and idle slots write to the end of the buffer.
        self._width = 2 * (max_k + 1)
        name = self.vocab_size, self.excluded
        self.drafts = ModelDrafts(model, allowed=self.allowed, name=name)

    @property
    def name(self) -> str:
        return "draft_model"

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k * self.model.config.n_layer)

    def reserve(self, target: TargetSession) -> None:
        self.pool(target)

    def memory(self, max_length: int) -> int:
        length = min(max_length, self.model.config.block_size) + self._width
        sizes = [block.attn.cache_shape(1, kv_bucket(length)) for block in self.model.transformer.h]
        return sum(2 * math.prod(size) for size in sizes) * self.model.transformer.wte.weight.element_size()

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftModelSession:
        return DraftModelSession(self, target, max_length, sampler)

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> list[Proposal]:
        own = [session for session in sessions if isinstance(session, DraftModelSession)]
        nothing = Proposal(torch.empty(0, dtype=torch.int64, device=own[0].target.device))
        found = [nothing] * len(own)
        ready: list[tuple[int, Asked, int]] = []
        for i, session in enumerate(own):
            if (most := min(k[i], self.max_k, session.limit - input_pos[i])) > 0:
                ready.append((i, session.ask(input_pos[i]), most))
        if ready:
            runner, pool = own[0].target.runner, own[0].pool
            wanted = [most for _, _, most in ready]
            proposals = self.drafts.propose([asked for _, asked, _ in ready], wanted, runner, pool.cache)
            for (i, _, most), proposal in zip(ready, proposals):
                own[i].drafted(input_pos[i], most)
                found[i] = proposal
        return found

    def pool(self, target: TargetSession) -> Pool:
        """Keys and values for all slots of the target's engine; allocated at the first call."""
        if self not in target.shared:
            count = target.whole.shape[0]
            length = min(target.max_length, self.model.config.block_size)
            cache = target.runner.make_cache(self.model, length, width=self._width, batch_size=count)
            target.shared[self] = Pool(cache, [[] for _ in range(count)])
        pool: Pool = target.shared[self]
        return pool

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (N, V) of ids that may be proposed, (N, v)."""
        if logits.size(1) > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        if self.never is not None:
            logits = logits.index_fill(1, self.never, float("-inf"))
        return logits


class DraftModelSession(DraftSession):
    """One text, see `drafters.DraftSession`.

    Rejected drafts need no cleanup: cache entries after the committed tokens are masked until they are overwritten. The
    model runs only when a proposal is requested. Tokens of earlier plain rounds are then read in one forward.

    Attributes:
        target: The text's target session.
        limit: Most positions of the text, limited by the draft model's context.
    """

    def __init__(self, drafter: DraftModel, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._device = drafter.device
        self.target = target
        self._sampler = sampler
        self.limit = min(max_length, drafter.model.config.block_size)
        self._tokens: list[int] = []  # the committed ones
        self._prompt_size = 0
        self._read = False  # whether the prompt is in the cache
        self._filled = 0  # positions in the cache that are final
        self._drafted = 0  # positions after `_filled` with the last proposal, valid if it is accepted
        self._pieces: tuple[int, ...] = PIECES

    @property
    def pool(self) -> Pool:
        """The cache of all slots."""
        return self._drafter.pool(self.target)

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        """Adds tokens. The first call after a proposal gives the accepted ones, then one of the target's own."""
        if not self._tokens:
            self._prompt_size = len(tokens)
        # The draft's embedding has no row for ids that only the target has; 0 replaces them.
        size = self._drafter.model.config.padded_vocab_size
        self._tokens += [token if token < size else 0 for token in tokens]
        # Accepted proposals stay in the cache. The target's own token has not been run yet.
        self._filled += min(len(tokens) - 1, self._drafted)
        self._drafted = 0

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return self._drafter.propose_batch([self], [token], [input_pos], [k])[0]

    @torch.inference_mode()
    def ask(self, input_pos: int) -> Asked:
        """The request for drafts after the token at `input_pos`. Reads committed tokens that the cache lacks."""
        pool, number = self.pool, self.target.number
        self._fill_prompt(pool)
        # The first step runs at least the last two tokens: after full acceptance the last proposal has not been run
        # yet, and a step of two rows costs the same as one row. Earlier missing tokens are read first.
        begin = max(0, input_pos + 1 - self._first_rows)
        missing = min(self._filled, input_pos - 1)
        if missing < input_pos - 1:
            missed = torch.tensor([self._tokens[missing : input_pos - 1]], device=self._device)
            self._model.prefill(missed, pool.slot(number), start=missing, chunk_size=PREFILL_CHUNK)
        return Asked(number, self._tokens[begin : input_pos + 1], begin, self._sampler, self._pieces)

    def drafted(self, input_pos: int, k: int) -> None:
        """Records that k tokens were drafted after the token at `input_pos`."""
        self._filled, self._drafted = input_pos + 1, k - 1

    def prepare(self, sizes: Sequence[int]) -> None:
        target, pool = self.target, self.pool
        self._pieces, built = self._drafter.drafts.prepare(
            self._sampler, self._first_rows, target.runner, pool.cache, sizes, self.limit
        )
        if built:
            pool.prompts = [[] for _ in pool.prompts]

    @property
    def _first_rows(self) -> int:
        return exact_rows(self._sampler) or 2

    def _fill_prompt(self, pool: Pool) -> None:
        """Reads the prompt except its last token, in its own forward, so that its bits do not depend on later text."""
        if self._read:
            return
        self._read = True
        number, prompt = self.target.number, self._tokens[: self._prompt_size - 1]
        best = max(range(len(pool.prompts)), key=lambda other: (pool.shared(other, prompt), other == number))
        start = pool.shared(best, prompt)
        pool.prompts[number] = []
        if best != number:
            pool.slot(number).copy_from(pool.slot(best), start)
        if start < len(prompt):
            rows = torch.tensor([prompt[start:]], device=self._device)
            self._model.prefill(rows, pool.slot(number), start=start, chunk_size=PREFILL_CHUNK)
        pool.prompts[number] = prompt
        self._filled = len(prompt)
