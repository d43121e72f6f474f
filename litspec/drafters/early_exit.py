"""The target's own first layers draft (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from litspec.drafters.autoregressive import CompiledDraft, draft_tokens, step_bytes
from litspec.drafters.base import Proposal
from litspec.errors import InputError
from litspec.model import GPT
from litspec.sampling import Distribution, Sampler

if TYPE_CHECKING:
    from litspec.rounds import TargetSession


class EarlyExit:
    """Drafts with the target's first layers, its final norm and its head, see `drafters.Drafter`.

    No second checkpoint, and the keys and values of those layers are the target's own. Good drafts need a target that
    was trained to exit early.

    Args:
        model: The target.
        max_k: Most proposals a round.
        exit_layer: Layers that draft; None for a quarter of them.

    Raises:
        InputError: For an `exit_layer` that the target has not.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: GPT, *, max_k: int, exit_layer: int | None = None) -> None:
        n_layer = model.config.n_layer
        if exit_layer is None:
            exit_layer = max(1, n_layer // 4)
        if not 1 <= exit_layer <= n_layer:
            raise InputError(f"exit_layer must be between 1 and the target's {n_layer} layers, got {exit_layer}")
        self.exit_layer = exit_layer
        self.max_k = max_k
        self.step_bytes = step_bytes(model, exit_layer)

    def begin(self, target: TargetSession, max_length: int, sampler: Sampler) -> EarlyExitSession:
        return EarlyExitSession(self, target, sampler)


class EarlyExitSession:
    """One text, see `drafters.DraftSession`.

    The drafts' keys and values stand in the target's cache behind its committed tokens, where the verification of the
    same round overwrites them in all layers and rows: there is nothing to undo.
    """

    def __init__(self, drafter: EarlyExit, target: TargetSession, sampler: Sampler) -> None:
        self._drafter = drafter
        self._target = target
        self._sampler = sampler
        self._compiled: CompiledDraft | None = None
        if target.graphs is not None:
            vocab_size = target.config.padded_vocab_size
            self._compiled = CompiledDraft(
                target.graphs, target.model, sampler, vocab_size=vocab_size, n_layer=drafter.exit_layer
            )

    def extend(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        """The target's cache knows."""

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        k = min(k, self._drafter.max_k)
        first = torch.tensor([token], device=self._target.device)
        if k < 1:
            return Proposal(first[:0])
        if self._compiled is not None:
            return self._compiled.propose(first, input_pos, k, self._target.cache)
        return draft_tokens(self._sampler, self._step(first, input_pos), self._step, input_pos + 1, k)

    def warm_up(self, pieces: Sequence[int]) -> None:
        """Builds the graphs that proposals will need, where steps are compiled; see `SpeculativeK.pieces`."""
        if self._compiled is not None:
            target = self._target
            if self._compiled.warm_up(1, target.cache, pieces, target.max_length):
                target.forget()

    def q_like(self) -> Distribution | None:
        """No rows of the form that a proposal's distributions have, where steps are compiled."""
        return None if self._compiled is None else self._compiled.q_like()

    def _step(self, token: torch.Tensor, input_pos: int) -> torch.Tensor:
        """Logits after one token, (1, V). One row, not W: a proposal need not have the target's bits."""
        target = self._target
        cache = target.cache
        logits = target.model.verify(
            token.view(1, 1),
            cache.slots[input_pos : input_pos + 1],
            cache,
            kv_length=cache.bucket(input_pos + 1),
            n_layer=self._drafter.exit_layer,
        )
        return logits[0]
