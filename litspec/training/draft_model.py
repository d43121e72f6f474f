"""Trains a draft model of LitGPT: all weights, or by LoRA."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import litgpt.lora
import litgpt.model
import torch
from litgpt.config import Config
from litgpt.utils import copy_config_files, save_config
from torch import Tensor, nn

from litspec.checkpoint import WEIGHTS, Checkpoint, check_pair, read_state_dict
from litspec.errors import InputError
from litspec.sampling import Sampling
from litspec.training.files import copy_prompt_style, save_atomically
from litspec.training.learner import Learner
from litspec.training.losses import head_loss
from litspec.training.measure import probability, ratios
from litspec.training.target import without_head
from litspec.training.types import LossName

if TYPE_CHECKING:
    from litspec.training.target import FrozenTarget

# Lists in a config with one entry per layer.
_BY_LAYER = ("sliding_window_indices", "rope_indices")


class DraftModel(Learner):
    """A draft model in training.

    Args:
        config: Its model config.
        weights: Its weights by LitGPT's names; None for small random ones, drawn from torch's generator.
        target: The frozen target.
        tokenizer_dir: Folder whose tokenizer files are copied to the draft's.
        dtype: Dtype of the saved weights.
        k: Proposals per round.
        loss: See `losses.distance`.
        temperature: Temperature of the distributions that are compared.
        lora_r: Rank of LoRA; 0 to train all weights.
        vocab_size: Ids that both models have; None for the smaller of the padded sizes.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Tensor] | None,
        target: FrozenTarget,
        *,
        tokenizer_dir: Path,
        dtype: torch.dtype,
        k: int,
        loss: LossName = "kl",
        temperature: float = 1.0,
        lora_r: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.k, self.width = config, k, config.n_embd
        self._target, self._tokenizer_dir, self._dtype = target, tokenizer_dir, dtype
        self._loss, self._temperature, self._lora_r = loss, temperature, lora_r
        self._vocab_size = vocab_size or min(config.padded_vocab_size, target.config.padded_vocab_size)
        self.gpt = _build(config, weights, lora_r).to(target.device)
        head, self._softcap = without_head(self.gpt)
        self.head: nn.Linear = head.linear if isinstance(head, litgpt.lora.LoRALinear) else head
        if lora_r:
            litgpt.lora.mark_only_lora_as_trainable(self)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over every position whose next token is in the answer or directly after it."""
        rows = self.gpt(self._known(batch["ids"]))
        place = torch.arange(rows.size(1), device=rows.device)
        mask = (place >= batch["begins"].unsqueeze(1) - 1) & (place < batch["ends"].unsqueeze(1))
        chosen = rows[mask]
        weights = torch.full((chosen.size(0),), 1 / chosen.size(0), device=rows.device)
        return head_loss(
            chosen,
            batch["final"][mask],
            weights,
            head=self.head,
            softcap=self._softcap,
            target_head=self._target.logits,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            name=self._loss,
        )

    @torch.no_grad()
    def ratios(self, batch: dict[str, Tensor], sampling: Sampling) -> list[Tensor]:
        """See `Learner.ratios`: one column, since proposals depend on the text alone."""
        rows = self.gpt(self._known(batch["ids"]))
        found = []
        for i, (begin, end) in enumerate(zip(batch["begins"].tolist(), batch["ends"].tolist())):
            tokens = batch["ids"][i, begin + 1 : end]
            logits = self.head(rows[i, begin : end - 1])[:, : self._vocab_size].float()
            if self._softcap is not None:
                logits = torch.tanh(logits / self._softcap) * self._softcap
            p = probability(self._target.logits(batch["final"][i, begin : end - 1]), tokens, sampling)
            q = probability(logits, tokens.clamp(max=self._vocab_size - 1), sampling)
            found.append(ratios(p, q.masked_fill(tokens >= self._vocab_size, 0.0)).unsqueeze(1))
        return found

    def _known(self, ids: Tensor) -> Tensor:
        """Replaces ids that the draft lacks by 0, as in decoding."""
        return ids.masked_fill(ids >= self.config.padded_vocab_size, 0)

    def weights(self) -> dict[str, Tensor]:
        """The weights by LitGPT's names, LoRA merged, in the dtype to be saved."""
        gpt = self.gpt
        if self._lora_r:
            gpt = copy.deepcopy(gpt)
            litgpt.lora.merge_lora_weights(gpt)
        found = {n.replace(".linear.", "."): w for n, w in gpt.state_dict().items() if "lora_" not in n}
        found |= {f"lm_head.{n}": w for n, w in self.head.state_dict().items()}
        return {name: w.detach().to("cpu", self._dtype, copy=True) for name, w in found.items()}

    @property
    def folder_bytes(self) -> int:
        parameters = sum(p.numel() for p in self.parameters())
        return parameters * torch.empty((), dtype=self._dtype).element_size()

    def save(self, folder: Path) -> None:
        """Writes a LitGPT checkpoint folder."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_config_files(self._tokenizer_dir, folder)
        (folder / "config.json").unlink(missing_ok=True)  # it describes the model of tokenizer_dir, not this one
        copy_prompt_style(self._tokenizer_dir, folder)
        save_config(self.config, folder)
        save_atomically(self.weights(), folder / WEIGHTS)


def _build(config: Config, weights: Mapping[str, Tensor] | None, lora_r: int) -> litgpt.model.GPT:
    """The module in float32; the config is a copy, since `without_head` changes it."""
    fields: dict[str, Any] = {name: copy.copy(getattr(config, name)) for name in config.__dataclass_fields__}
    if not lora_r:
        gpt = litgpt.model.GPT(Config(**fields))
        if weights is None:
            initialize(gpt)
        else:
            gpt.load_state_dict({name: w.float() for name, w in weights.items()})
        return gpt
    targets = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp"), True)
    lora = litgpt.lora.Config(**fields, lora_r=lora_r, lora_alpha=2 * lora_r, **targets)
    gpt = litgpt.lora.GPT(lora)
    if weights is None:
        raise InputError(
            "lora_r needs an existing draft model, but draft_config starts from a new one; leave out lora_r."
        )
    # LitGPT's LoRA model accepts the names of plain checkpoints.
    gpt.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    return gpt


def initialize(gpt: litgpt.model.GPT) -> None:
    """Small random weights. Projections into the residual stream start smaller the deeper the model is."""
    gpt.apply(gpt._init_weights)
    for block in gpt.transformer.h:
        for projection in (block.attn.proj, getattr(block.mlp, "proj", None)):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * gpt.config.n_layer))


def first_layers(target: Checkpoint, count: int) -> tuple[Config, dict[str, Tensor]]:
    """Config and weights of a model of the target's first layers, its embedding, final norm and head.

    Raises:
        InputError: `count` is not at least 1 and below the target's number of layers.
    """
    whole = target.config
    if not 1 <= count < whole.n_layer:
        raise InputError(f"from_layers must be at least 1 and below the target's {whole.n_layer} layers, got {count}")
    changed: dict[str, Any] = {"n_layer": count, "name": f"{whole.name}-first-{count}"}
    for name in _BY_LAYER:
        if (values := getattr(whole, name)) is not None:
            changed[name] = values[:count]
    weights = {
        name: w
        for name, w in read_state_dict(target).items()
        if not name.startswith("transformer.h.") or int(name.split(".")[2]) < count
    }
    return replace(whole, **changed), weights


def shared_vocabulary(target: Checkpoint, draft: Checkpoint) -> int:
    """Number of ids that both models have.

    Raises:
        InputError: Their tokenizers differ.
    """
    return check_pair(target, draft).shared_vocab_size
