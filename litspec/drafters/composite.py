"""Two drafters combined: prompt lookup if the last tokens occur earlier in the text, else a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.prompt_lookup import PromptLookup, PromptLookupSession
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession


class LookupThenModel(Drafter):
    """Uses the proposal of prompt lookup, or that of another drafter if prompt lookup finds nothing.

    Args:
        lookup: Its shortest n-gram should be long enough that the same continuation is likely.
        model: The other drafter.
    """

    def __init__(self, lookup: PromptLookup, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model
        self.taps = model.taps
        self.max_k = model.max_k
        self.notes = model.notes

    @property
    def name(self) -> str:
        return "lookup_then_model"

    def cost(self, k: int) -> Cost:
        return self._model.cost(k)

    def reserve(self, target: TargetSession) -> None:
        self._model.reserve(target)

    def memory(self, max_length: int) -> int:
        return self._model.memory(max_length)

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> list[Proposal]:
        own = [session for session in sessions if isinstance(session, LookupThenModelSession)]
        found = [session.lookup.propose(*asked) for session, *asked in zip(own, tokens, input_pos, k)]
        rest = [i for i, proposal in enumerate(found) if not proposal.tokens.size(0)]
        if rest:
            drafted = self._model.propose_batch(
                [own[i].model for i in rest],
                [tokens[i] for i in rest],
                [input_pos[i] for i in rest],
                [k[i] for i in rest],
            )
            for i, proposal in zip(rest, drafted):
                found[i] = proposal
        return found

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> LookupThenModelSession:
        return LookupThenModelSession(
            self._lookup.start(target, max_length, sampler), self._model.start(target, max_length, sampler)
        )


class LookupThenModelSession(DraftSession):
    """One text."""

    def __init__(self, lookup: PromptLookupSession, model: DraftSession) -> None:
        self.lookup = lookup
        self.model = model

    def resume(self, prompt: Sequence[int], most: int) -> int:
        held = self.model.resume(prompt, most)
        if held:
            self.lookup.commit(list(prompt[:held]), 0)
        return held

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        self.lookup.commit(tokens, input_pos)
        self.model.commit(tokens, input_pos, hidden)

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        found = self.lookup.propose(token, input_pos, k)
        return found if found.tokens.size(0) else self.model.propose(token, input_pos, k)

    def prepare(self, sizes: Sequence[int]) -> None:
        self.model.prepare(sizes)

    def close(self) -> None:
        self.model.close()
