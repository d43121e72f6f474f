"""Trains a block drafter (DFlash, arXiv 2602.06036, version 1) and writes its published format.

Each step trains on several blocks of a text. A block begins at an anchor: a token of the answer, in the role of the
last committed token. Row j of a block is for the token j places after the anchor. It sees the rows of its own block and
the target's states strictly before the anchor, as in decoding, where the anchor's own state is not known yet.

Shapes: N texts of T tokens, A anchors each, B rows a block, C channels, H query heads, G groups, D elements of a head.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from litspec.drafters.folders import CONFIG, SAFETENSORS
from litspec.jobs.disk import write_atomically
from litspec.model.attention import rotate
from litspec.model.dflash import Attention, DFlashConfig, DFlashNetwork, Rope
from litspec.sampling import Sampling
from litspec.training.files import write_in_place
from litspec.training.learner import Learner
from litspec.training.losses import head_loss
from litspec.training.measure import probability, ratios
from litspec.training.types import LossName

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.training.target import FrozenTarget

# Blocks that are measured together.
MEASURED_BLOCKS = 64
ROPE_BASE = 10000.0


def spread_taps(n_layer: int) -> tuple[int, ...]:
    """Three blocks of the target to read: early, in the middle, and the second to last; fewer if it has fewer."""
    return tuple(sorted({n_layer // 5, n_layer // 2, max(n_layer - 2, 0)}))


def network_config(target: Config, *, layers: int, block_size: int, mask_token_id: int) -> DFlashConfig:
    """A drafter of the target's width and heads, with full attention and an MLP of 8/3 of the width.

    Args:
        target: The target's config.
        layers: Number of the drafter's layers.
        block_size: B.
        mask_token_id: An id that does not occur in a text before its end.
    """
    head_size = target.head_size if target.head_size and target.n_embd % target.head_size == 0 else 64
    n_head = max(1, target.n_embd // head_size)
    groups = target.n_query_groups if n_head % target.n_query_groups == 0 else n_head
    return DFlashConfig(
        n_embd=target.n_embd,
        vocab_size=target.padded_vocab_size,
        intermediate_size=math.ceil(target.n_embd * 8 / 3 / 64) * 64,
        n_head=n_head,
        n_query_groups=groups,
        head_size=head_size,
        taps=spread_taps(target.n_layer),
        block_size=block_size,
        mask_token_id=mask_token_id,
        windows=(None,) * layers,
        causal=(False,) * layers,
        rope_base=ROPE_BASE,
        embedding_scale=target.n_embd**0.5 if target.scale_embeddings else 1.0,
    )


def published_config(config: DFlashConfig, target: Config) -> dict[str, Any]:
    """`config.json` in z-lab's format."""
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    if config.embedding_scale != 1:
        own["input_embedding_scale"] = config.embedding_scale
    if target.final_logit_softcapping:
        own["final_logit_softcapping"] = target.final_logit_softcapping
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": "bfloat16",
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.n_layer,
        "max_position_embeddings": target.block_size,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_query_groups,
        "num_target_layers": target.n_layer,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_base, "rope_type": "default"},
        "rope_theta": config.rope_base,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


class BlockDrafter(Learner):
    """A block drafter in training.

    Args:
        config: Of the network.
        target: The frozen target, with the taps of the config. Its embedding and head are used.
        loss: See `losses.distance`.
        temperature: Temperature of the distributions that are compared.
        anchors: Blocks per text and step.
    """

    def __init__(
        self,
        config: DFlashConfig,
        target: FrozenTarget,
        *,
        loss: LossName = "kl",
        temperature: float = 1.0,
        anchors: int = 32,
    ) -> None:
        super().__init__()
        self.config, self.k, self.width, self.taps = config, config.max_k, config.n_embd, config.taps
        self._target, self._loss, self._temperature, self._anchors = target, loss, temperature, anchors
        self.network = DFlashNetwork(config)
        for name, parameter in self.network.named_parameters():
            if parameter.dim() > 1:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if small else 0.02)
        # The states may have any scale, and their projection is normalised, so it starts as an average.
        torch.nn.init.normal_(self.network.fc.weight, std=self.network.fc.in_features**-0.5)
        self.to(target.device)
        self._tables: Rope | None = None

    def random(self, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Adds `anchors` (N, A): distinct places in the answers; -1 where a text has no more."""
        places = torch.arange(batch["ids"].size(1))
        begins, ends = (batch[name].cpu().unsqueeze(1) for name in ("begins", "ends"))
        order = torch.rand(batch["ids"].shape, generator=torch.Generator().manual_seed(seed))
        order = order.masked_fill((places < begins) | (places >= ends - 1), -1.0)
        best = order.topk(min(self._anchors, order.size(1)), dim=1)
        return {**batch, "anchors": best.indices.masked_fill(best.values < 0, -1).to(batch["ids"].device)}

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over rows 1 to B - 1 of all blocks. The weights exp(-(j - 1) / (B / 2)) favour early rows."""
        config, anchors, ends = self.config, batch["anchors"], batch["ends"]
        rows = self.block_rows(batch["ids"], batch["tapped"], anchors)[:, :, 1:]
        offset = torch.arange(1, config.block_size, device=anchors.device)
        # Row j learns the target's distribution of the token j after the anchor, found at the place before that token.
        teacher = anchors.unsqueeze(2) + offset - 1
        taught = (anchors >= 0).unsqueeze(2) & (teacher < ends.view(-1, 1, 1))
        weights = torch.exp(-(offset - 1) / (config.block_size / 2)).expand_as(taught)[taught]
        text = torch.arange(anchors.size(0), device=anchors.device).view(-1, 1, 1).expand_as(teacher)
        return head_loss(
            rows[taught],
            batch["final"][text[taught], teacher[taught]],
            weights / weights.sum(),
            head=self._target.lm_head,
            softcap=self._target.softcap,
            target_head=self._target.logits,
            vocab_size=config.vocab_size,
            temperature=self._temperature,
            name=self._loss,
        )

    def block_rows(self, ids: Tensor, tapped: Tensor, anchors: Tensor) -> Tensor:
        """The input of the head for the rows of every block.

        Args:
            ids: (N, T).
            tapped: The target's states, (N, T, len(taps) * C).
            anchors: (N, A); a block at -1 is computed like one at 0, and its result has no meaning.

        Returns:
            (N, A, B, C).
        """
        config, network = self.config, self.network
        N, T = ids.shape
        A, B = anchors.size(1), config.block_size
        anchors = anchors.clamp(min=0)
        block_ids = torch.full((N, A, B), config.mask_token_id, device=ids.device)
        block_ids[:, :, 0] = ids.gather(1, anchors)
        x = F.embedding(block_ids.view(N, A * B), self._target.embedding).float() * config.embedding_scale
        places = (anchors.unsqueeze(2) + torch.arange(B, device=ids.device)).view(N, A * B)
        cos, sin = self._rope(T + B)
        rope = cos[places], sin[places]
        context = network.hidden_norm(network.fc(tapped.to(network.fc.weight.dtype)))
        before = torch.arange(T, device=ids.device) < anchors.unsqueeze(2)  # (N, A, T)
        block = torch.arange(A, device=ids.device).repeat_interleave(B)
        own = (block.unsqueeze(1) == block).expand(N, -1, -1)
        mask = torch.cat((before.repeat_interleave(B, dim=1), own), dim=2).unsqueeze(1)  # (N, 1, A * B, T + A * B)
        layers: Any = network.layers
        for layer in layers:
            y = layer.input_layernorm(x)
            x = x + _attention(layer.self_attn, y, rope, context, (cos[:T], sin[:T]), mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return network.norm(x).view(N, A, B, -1)

    def _rope(self, length: int) -> Rope:
        if self._tables is None or self._tables[0].size(0) < length:
            self._tables = self.network.rope_tables(length)
        return self._tables

    @torch.no_grad()
    def ratios(self, batch: dict[str, Tensor], sampling: Sampling) -> list[Tensor]:
        """See `Learner.ratios`: a row for the block after each token of the answer, (n, k)."""
        return [
            self._ratios(batch["ids"][i, :end], batch["tapped"][i, :end], batch["final"][i, :end], begin, end, sampling)
            for i, (begin, end) in enumerate(zip(batch["begins"].tolist(), batch["ends"].tolist()))
        ]

    def _ratios(self, ids: Tensor, tapped: Tensor, final: Tensor, begin: int, end: int, sampling: Sampling) -> Tensor:
        p = torch.zeros(end, device=ids.device)  # probability of each token by the target
        p[begin + 1 :] = probability(self._target.logits(final[begin:-1]), ids[begin + 1 :], sampling)
        found = []
        for anchors in torch.arange(begin, end - 1, device=ids.device).split(MEASURED_BLOCKS):
            rows = self.block_rows(ids.unsqueeze(0), tapped.unsqueeze(0), anchors.unsqueeze(0))[0, :, 1:]
            places = anchors.unsqueeze(1) + torch.arange(1, self.config.block_size, device=ids.device)
            tokens = ids[places.clamp(max=end - 1)]
            q = probability(self._target.logits(rows.flatten(0, 1)), tokens.flatten(), sampling).view_as(places)
            found.append(ratios(p[places.clamp(max=end - 1)], q).masked_fill(places >= end, 0.0))
        return torch.cat(found)

    @property
    def folder_bytes(self) -> int:
        return 2 * sum(p.numel() for p in self.network.parameters())

    def save(self, folder: Path) -> None:
        """Writes a published DFlash folder, in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: w.detach().to("cpu", torch.bfloat16).contiguous() for n, w in self.network.state_dict().items()}
        config = json.dumps(published_config(self.config, self._target.config), indent=2) + "\n"
        write_atomically(folder / CONFIG, config.encode())
        write_in_place(folder / SAFETENSORS, lambda path: save_file(weights, path, metadata={"format": "pt"}))


def _attention(
    attention: Attention, y: Tensor, rope: Rope, context: Tensor, context_rope: Rope, mask: Tensor
) -> Tensor:
    """`model.dflash.Attention` for all blocks of several texts at once.

    Args:
        attention: The weights.
        y: The blocks' rows, (N, R, C).
        rope: Cosines and sines of their places.
        context: Projected states, (N, T, C).
        context_rope: Those of places 0, ..., T - 1.
        mask: True where a row sees a key, (N, 1, R, T + R).
    """
    H, G, D = attention.n_head, attention.n_query_groups, attention.head_size
    N, R = y.shape[:2]

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(N, -1, count, D)

    q = rotate(attention.q_norm(heads(attention.q_proj(y), H)), *rope)
    k_context = rotate(attention.k_norm(heads(attention.k_proj(context), G)), *context_rope)
    k_own = rotate(attention.k_norm(heads(attention.k_proj(y), G)), *rope)
    k = torch.cat((k_context, k_own), dim=1).transpose(1, 2)
    v = heads(attention.v_proj(torch.cat((context, y), dim=1)), G).transpose(1, 2).to(k.dtype)
    # The query heads of a group become rows of one head: keys and values are never expanded.
    q = q.view(N, R, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(N, G, H // G * R, D).to(k.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(1, 1, H // G, 1))
    out = out.view(N, G, H // G, R, D).permute(0, 3, 1, 2, 4).reshape(N, R, H * D)
    projected: Tensor = attention.o_proj(out)
    return projected
