"""The frozen target: its states over given texts, and its head.

A draft learns from these states: the residual stream after some blocks (the taps) and the input of the head, which
gives the target's distribution at every position. For small targets and few texts they are computed once and kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import litgpt.model
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litspec.checkpoint import Checkpoint, check_sizes, read_state_dict
from litspec.training.texts import Text

# The most bytes of states that are kept in memory. If there are more, each step computes its own.
KEPT_BYTES = 2 << 30
TEXTS_AT_ONCE = 16


def load_gpt(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> litgpt.model.GPT:
    """LitGPT's own model with a checkpoint's weights, for forwards over whole texts.

    Raises:
        InputError: The file of weights cannot be used.
    """
    check_sizes(checkpoint)
    weights = read_state_dict(checkpoint)
    with torch.device("meta"):
        model = litgpt.model.GPT(copy.copy(checkpoint.config))  # a copy, as `without_head` changes it
    model.load_state_dict({name: w.to(device, dtype, copy=True) for name, w in weights.items()}, assign=True)
    model.cos, model.sin = model.rope_cache(device=device)
    return model


def without_head(model: litgpt.model.GPT) -> tuple[nn.Linear, float | None]:
    """Removes the head of a model, whose forward then returns the input of the head. Returns the head and the soft cap
    of its logits."""
    head, softcap = model.lm_head, model.config.final_logit_softcapping
    model.lm_head = nn.Identity()
    model.config.final_logit_softcapping = None
    return head, softcap


class FrozenTarget:
    """The target without gradients.

    Args:
        checkpoint: Its folder.
        dtype: Dtype of its weights.
        device: Device of weights and states.
        taps: Blocks (0-based) after which the residual stream is needed; -1 is the state after the final norm.

    Attributes:
        config: Its model config.
        embedding: The raw embedding, `(V, C)`.
        lm_head: The head.
        softcap: Soft cap of the logits; None without one.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, taps: Sequence[int] = ()
    ) -> None:
        self.config = checkpoint.config
        self.device = device
        self.taps = tuple(taps)
        self._model = load_gpt(checkpoint, dtype, device).eval().requires_grad_(False)
        self.lm_head, self.softcap = without_head(self._model)
        self.embedding: Tensor = self._model.transformer.wte.weight
        self._seen: dict[int, Tensor] = {}
        for tap in self.taps:
            if tap >= 0:
                self._model.transformer.h[tap].register_forward_hook(self._keep(tap))

    def _keep(self, tap: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self._seen[tap] = output

        return hook

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """`(N, T)` to `(N, T, (len(taps) + 1) * C)`: the taps' states in their order, then the input of the head."""
        final: Tensor = self._model(ids.to(self.device))
        seen = {**self._seen, -1: final}
        self._seen.clear()
        return torch.cat([*(seen[tap] for tap in self.taps), final], dim=-1)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits `(R, V)` of rows `(R, C)`."""
        found = F.linear(rows.to(self.lm_head.weight.dtype), self.lm_head.weight, self.lm_head.bias)
        return found if self.softcap is None else torch.tanh(found / self.softcap) * self.softcap


class StatesOf:
    """The target's states over a list of texts, by batch.

    Args:
        target: The target.
        texts: The texts.
        keep: Whether to compute all states at once and keep them, if they need at most `KEPT_BYTES`.
    """

    def __init__(self, target: FrozenTarget, texts: Sequence[Text], *, keep: bool) -> None:
        self._target, self._texts = target, texts
        self._kept: list[Tensor] = []
        tokens = sum(len(text.ids) for text in texts)
        width = (len(target.taps) + 1) * target.config.n_embd
        if keep and tokens * width * target.embedding.element_size() <= KEPT_BYTES:
            # Always in the same groups, as the bits of a state depend on the number of rows.
            for begin in range(0, len(texts), TEXTS_AT_ONCE):
                part = texts[begin : begin + TEXTS_AT_ONCE]
                found = target.states(padded(part)).cpu()
                self._kept += [row[: len(text.ids)].clone() for row, text in zip(found, part)]

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Some of the texts, padded at their ends to the longest.

        Returns:
            `ids` (N, T); `begins` (N,), where the answers begin; `ends` (N,), where the texts end; `final` (N, T, C),
            the input of the target's head; `tapped` (N, T, len(taps) * C).
        """
        texts = [self._texts[i] for i in numbers]
        device, width = self._target.device, self._target.config.n_embd
        ids = padded(texts).to(device)
        if self._kept:
            states = nn.utils.rnn.pad_sequence([self._kept[i] for i in numbers], batch_first=True).to(device)
        else:
            states = self._target.states(ids)
        return {
            "ids": ids,
            "begins": torch.tensor([text.start for text in texts], device=device),
            "ends": torch.tensor([len(text.ids) for text in texts], device=device),
            "final": states[..., -width:],
            "tapped": states[..., :-width],
        }


def padded(texts: Sequence[Text]) -> Tensor:
    """The texts' ids `(N, T)`, zeros after their ends."""
    return nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
