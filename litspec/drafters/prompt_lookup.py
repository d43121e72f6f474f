"""Prompt lookup (n-gram drafting): proposes the tokens that followed an earlier occurrence of the last few tokens.

It needs no second model. It works well if the text repeats parts of the prompt: summaries, edits, code, extraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.errors import InputError
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession


class PromptLookup(Drafter):
    """Drafts from the prompt and the completion so far, see `drafters.Drafter`.

    Let x be the text of T tokens. For n = `max_ngram`, ..., `min_ngram`, in this order, take the largest e < T with
    x[e-n:e] = x[T-n:T]: the most recent earlier occurrence of the last n tokens. Token j of the proposal is x[e+j]. At
    the end of the text it continues with its own tokens, so that the last T - e tokens repeat until the proposal is
    full. It ends with its first stop token.

    Args:
        max_k: Most proposals per round.
        max_ngram: Longest n-gram to look for, in tokens.
        min_ngram: Shortest n-gram to look for, in tokens.

    Raises:
        InputError: Not 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_k: int, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"prompt lookup needs 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.max_k = max_k
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    @property
    def name(self) -> str:
        return "prompt_lookup"

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> PromptLookupSession:
        return PromptLookupSession(self, target.stop_ids)


class PromptLookupSession(DraftSession):
    """One text, see `drafters.DraftSession`. Its n-gram tables are updated when a proposal is requested."""

    def __init__(self, drafter: PromptLookup, stop_ids: Sequence[int] = ()) -> None:
        self._max_k = drafter.max_k
        self._stop_ids = frozenset(stop_ids)
        self._tokens: list[int] = []
        self._noted = 0  # n-grams that end before this position are in the tables
        # For each length, longest first: n-gram -> end of its most recent occurrence with a known next token.
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (n, {}) for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1)
        ]

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        self._tokens += tokens

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return Proposal(torch.tensor(self.search(min(k, self._max_k)), dtype=torch.int64))

    def search(self, k: int) -> list[int]:
        """Proposes at most k tokens, as a list on the host."""
        self._note()
        tokens = self._tokens
        size = len(tokens)
        for n, ends in self._ends:
            end = ends.get(tuple(tokens[-n:]))
            if end is None:
                continue
            proposal = tokens[end : end + k]
            for j in range(len(proposal), k):
                proposal.append(proposal[j - (size - end)])
            if not self._stop_ids.isdisjoint(proposal):
                first = next(j for j, proposed in enumerate(proposal) if proposed in self._stop_ids)
                del proposal[first + 1 :]
            return proposal
        return []

    def _note(self) -> None:
        """Adds the n-grams whose next token is now known."""
        tokens, size = self._tokens, len(self._tokens)
        for n, ends in self._ends:
            start = max(self._noted, n)
            if start < size:
                ngrams = zip(*(tokens[start - n + i : size - n + i] for i in range(n)))
                ends.update(zip(ngrams, range(start, size)))
        self._noted = size
