"""Drafting with the target's own first layers (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from litspec.drafters.autoregressive import Asked, ModelDrafts, exact_rows, step_bytes
from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.speculative_k import PIECES
from litspec.errors import InputError
from litspec.model import GPT
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession


class EarlyExit(Drafter):
    """Drafts with the target's first layers, its final norm and its head, see `drafters.Drafter`.

    It needs no second checkpoint and uses the target's own keys and values. Good drafts need a target that was trained
    for early exit.

    Args:
        model: The target.
        max_k: Most proposals per round.
        exit_layer: Layers that draft; None for a quarter of them.

    Raises:
        InputError: The target does not have `exit_layer` layers.
    """

    def __init__(self, model: GPT, *, max_k: int, exit_layer: int | None = None) -> None:
        n_layer = model.config.n_layer
        if exit_layer is None:
            exit_layer = max(1, n_layer // 4)
        if not 1 <= exit_layer <= n_layer:
            raise InputError(f"exit_layer must be between 1 and the target's {n_layer} layers, got {exit_layer}")
        self.exit_layer = exit_layer
        self.max_k = max_k
        self._step_bytes = step_bytes(model, exit_layer)
        self.drafts = ModelDrafts(model, n_layer=exit_layer)

    @property
    def name(self) -> str:
        return "early_exit"

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k * self.exit_layer)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> EarlyExitSession:
        return EarlyExitSession(self, target, sampler)

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> list[Proposal]:
        own = [session for session in sessions if isinstance(session, EarlyExitSession)]
        target = own[0].target
        asked = [session.ask(place) for session, place in zip(own, input_pos)]
        return self.drafts.propose(asked, [min(each, self.max_k) for each in k], target.runner, target.whole)


class EarlyExitSession(DraftSession):
    """One text, see `drafters.DraftSession`.

    Drafts write their keys and values to the target's cache, after the committed tokens. The verification of the same
    round overwrites them in all layers, so rejected drafts need no cleanup.
    """

    def __init__(self, drafter: EarlyExit, target: TargetSession, sampler: Sampler) -> None:
        self._drafter = drafter
        self.target = target
        self._sampler = sampler
        self._tokens: list[int] = []
        self._pieces: tuple[int, ...] = PIECES

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        self._tokens += tokens

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return self._drafter.propose_batch([self], [token], [input_pos], [k])[0]

    def ask(self, input_pos: int) -> Asked:
        """The request for drafts after the token at `input_pos`."""
        begin = max(0, input_pos + 1 - self._first_rows)
        return Asked(self.target.number, self._tokens[begin : input_pos + 1], begin, self._sampler, self._pieces)

    def prepare(self, sizes: Sequence[int]) -> None:
        target = self.target
        self._pieces, built = self._drafter.drafts.prepare(
            self._sampler, self._first_rows, target.runner, target.whole, sizes, target.max_length
        )
        if built:
            target.forget()

    @property
    def _first_rows(self) -> int:
        # One row is enough: a proposal need not have the target's bits.
        return exact_rows(self._sampler) or 1
