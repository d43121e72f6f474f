"""Decoder layers of published drafters: converts Hugging Face's `config.json` and weight names to LitGPT's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from torch import Tensor

from litspec.errors import InputError


def take(weights: dict[str, Tensor], name: str, folder: Path) -> Tensor:
    """Removes a tensor from the weights and returns it.

    Raises:
        InputError: It is missing.
    """
    if name not in weights:
        raise InputError(f"The weights in {str(folder)!r} lack {name!r}.")
    return weights.pop(name)


def number(config: Mapping[str, Any], name: str, folder: Path) -> int:
    """A positive integer of `config.json`.

    Raises:
        InputError: It is missing or not a positive integer.
    """
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"config.json in {str(folder)!r} must give {name} as a whole number, got {value!r}.")
    return value


def nested(config: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """A nested object of `config.json`; empty if it is missing.

    Raises:
        InputError: The value is not an object.
    """
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"config.json in {str(folder)!r} must give {name} as an object, got {value!r}.")
    return value


def layer_config(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    n_layer: int,
    block_size: int,
    first_layer: int = 0,
) -> Config:
    """Converts Hugging Face's config of decoder layers to LitGPT's. The result has no vocabulary.

    Args:
        config: Content of `config.json`.
        weights: Weights of one layer, by Hugging Face's names after `layers.0.`; they show its biases and norms.
        folder: For messages.
        n_layer: Number of such layers.
        block_size: Positions that they can attend to.
        first_layer: Index of the first of them in lists with an entry per layer.

    Raises:
        InputError: litspec's model does not support such a layer.
    """
    n_embd, n_head = number(config, "hidden_size", folder), number(config, "num_attention_heads", folder)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"config.json in {str(folder)!r} has hidden_act {activation!r}; only 'silu' is supported.")
    _check_windows(config, folder, first_layer, block_size)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    adjustments: dict[str, Any] | None = None
    if kind == "linear":
        adjustments = {"factor": rope["factor"]}
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        adjustments = {name: rope[name] for name in names}
        adjustments["original_max_seq_len"] = rope["original_max_position_embeddings"]
    elif kind != "default":
        raise InputError(
            f"config.json in {str(folder)!r} has rope type {kind!r}; default, linear and llama3 are supported."
        )
    share = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    experts: dict[str, Any] = {"mlp_class_name": "LLaMAMLP"}
    if "mlp.gate.weight" in weights:
        experts = _expert_config(config, weights, folder)
    return Config(
        name="drafter",
        block_size=block_size,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_query_groups=config.get("num_key_value_heads") or n_head,
        head_size=config.get("head_dim") or n_embd // n_head,
        intermediate_size=number(config, "intermediate_size", folder),
        vocab_size=1,
        padded_vocab_size=1,
        norm_class_name="RMSNorm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        norm_qk="self_attn.q_norm.weight" in weights,
        attn_bias="self_attn.q_proj.bias" in weights,
        bias=False,
        parallel_residual=False,
        rotary_percentage=share,
        rope_base=config.get("rope_theta", rope.get("rope_theta", 10_000)),
        rope_adjustments=adjustments,
        **experts,
    )


# Families whose config may give a window that is unused unless `use_sliding_window` is true.
_WINDOW_OFF = ("llama", "qwen", "mimo")


def _check_windows(config: Mapping[str, Any], folder: Path, first_layer: int, block_size: int) -> None:
    """Raises an `InputError` for layers with a sliding window shorter than `block_size`."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        # If the list ends with the target's layers, the type of these layers is unknown.
        slides = any(str(kind).startswith(("sliding", "chunked")) for kind in kinds[first_layer:] or kinds)
    else:
        off = str(config.get("model_type", "")).startswith(_WINDOW_OFF)
        slides = bool(window) and bool(config.get("use_sliding_window", not off))
    if slides and not (isinstance(window, int) and window >= block_size):
        raise InputError(
            f"config.json in {str(folder)!r} gives the drafter's layers a sliding window (sliding_window {window!r}), "
            "but litspec runs EAGLE-3 and MTP layers with full attention only; give a drafter without a window."
        )


def _expert_config(config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """Fields of LitGPT's config for a mixture of experts: DeepSeek's and GLM's router, or the softmax router."""
    fields: dict[str, Any] = {
        "mlp_class_name": "LLaMAMoE",
        "n_expert": weights["mlp.gate.weight"].size(0),
        "n_expert_per_token": number(config, "num_experts_per_tok", folder),
        "moe_intermediate_size": number(config, "moe_intermediate_size", folder),
        "n_shared_expert": config.get("n_shared_experts") if _has(weights, "mlp.shared_experts.") else None,
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
    }
    if "mlp.gate.e_score_correction_bias" in weights:
        groups, kept = config.get("n_group") or 1, config.get("topk_group") or 1
        # LitGPT needs several groups. Two groups that are both kept have no effect.
        groups, kept = (2, 2) if groups == 1 else (groups, kept)
        fields |= {"n_expert_groups": groups, "n_topk_groups": kept, "n_topk_scores_per_group": 2}
        if fields["n_expert"] % groups or fields["n_expert"] < 2 * groups:
            raise InputError(
                f"The layers in {str(folder)!r} have {fields['n_expert']} experts in {groups} groups; the router needs "
                "equal groups of at least two."
            )
    elif not fields["norm_topk_prob"]:
        raise InputError(
            f"config.json in {str(folder)!r} sets norm_topk_prob to false; without DeepSeek's router it must be true."
        )
    return fields


def _has(weights: Mapping[str, Tensor], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in weights)


NAMES = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.norm_q",
    "self_attn.k_norm": "attn.norm_k",
    "mlp.gate": "mlp.gate",
}
PARTS = {"gate_proj": "fc_1", "up_proj": "fc_2", "down_proj": "proj"}


def litgpt_layer(layer: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Renames the weights of a decoder layer to LitGPT's names.

    Args:
        layer: Weights by Hugging Face's names, after `layers.0.`.
        folder: For messages.

    Raises:
        InputError: A weight is unknown, for example of latent attention.
    """
    rest = dict(layer)
    found = {}
    for end in ("weight", "bias"):
        if f"self_attn.q_proj.{end}" in rest:
            parts = [take(rest, f"self_attn.{x}_proj.{end}", folder) for x in "qkv"]
            found[f"attn.qkv.{end}"] = torch.cat(parts)
    rest.pop("self_attn.rotary_emb.inv_freq", None)  # a buffer in old files
    for name, weight in rest.items():
        path, _, end = name.rpartition(".")
        if path in NAMES and end in ("weight", "e_score_correction_bias"):
            found[f"{NAMES[path]}.{end}"] = weight
        elif part := re.fullmatch(r"(mlp\.(?:experts\.\d+\.|shared_experts\.)?)(\w+_proj)\.weight", name):
            found[f"{part.group(1)}{PARTS[part.group(2)]}.weight"] = weight
        else:
            raise InputError(
                f"A layer in {str(folder)!r} has an unknown weight {name!r}; supported are attention with q_proj, "
                "k_proj, v_proj and o_proj, and an MLP with gate_proj, up_proj and down_proj."
            )
    return found
