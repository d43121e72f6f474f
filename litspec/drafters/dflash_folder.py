"""Loads a published DFlash folder, in z-lab's format or in speculators' format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from litspec.drafters.dflash import EMBEDDING, DFlash, check_fit
from litspec.drafters.folders import CONFIG, open_published
from litspec.errors import InputError
from litspec.model.dflash import DFlashConfig, DFlashNetwork

if TYPE_CHECKING:
    from litspec.model import GPT

# Weights that are not read: copies of the target's, which are shared instead, and the inverse of d2t.
BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_dflash(folder: Path, target: GPT) -> DFlash:
    """Loads the drafter of a folder, in the dtype and on the device of the target's embedding.

    Args:
        folder: A folder with `config.json` and weights.
        target: The target's model.

    Raises:
        InputError: The folder cannot be used, or was made for another target.
    """
    published = open_published(folder)
    what = f"The DFlash drafter in {str(folder)!r}"
    names = [name for name in published.files if name not in BORROWED]
    if "d2t" not in names:
        names = [name for name in names if name != "lm_head.weight"]
    config = read_config(published.config, what, target.config.n_layer, full_vocabulary="d2t" not in names)
    check_fit(config, target.config, what)
    like = target.get_parameter(EMBEDDING)
    weights = {_own_name(name): tensor for name, tensor in published.read(names).items()}
    with torch.device("meta"):
        network = DFlashNetwork(config)
    _check_names(network, weights, what)
    network.load_state_dict(
        {
            name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else torch.int64)
            for name, tensor in weights.items()
        },
        assign=True,
    )
    if network.d2t is not None:
        _check_map(network.d2t, config, what)
    return DFlash(network)


def read_config(
    raw: Mapping[str, Any], what: str, n_layer: int | None = None, *, full_vocabulary: bool = True
) -> DFlashConfig:
    """Reads the configuration of either format.

    speculators nests the layers' fields in `transformer_layer_config`. It numbers the target's states from the
    embedding's output, z-lab from the first block's output.

    Args:
        raw: Content of `config.json`.
        what: The drafter's name in error messages.
        n_layer: Number of the target's blocks; None if unknown.
        full_vocabulary: Whether its logits cover all of the target's ids.

    Raises:
        InputError: A field is missing, or has an unsupported value.
    """
    nested = raw.get("transformer_layer_config")
    layers: Mapping[str, Any] = nested if nested is not None else raw
    own: Mapping[str, Any] = raw if nested is not None else {**raw, **(raw.get("dflash_config") or {})}

    need = partial(_need, what)
    if (act := layers.get("hidden_act", "silu")) != "silu":
        raise InputError(f"{what} has hidden_act {act!r}; litspec supports only 'silu' in DFlash drafters.")
    made_for = own.get("num_target_layers")
    if made_for is not None and n_layer is not None and made_for != n_layer:
        raise InputError(
            f"{what} was made for a target of {made_for} layers, but this target has {n_layer}; give a drafter for "
            "this target."
        )
    n_embd, n_head, count = (need(layers, n) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    windows, causal = _attention(raw, layers, own, count)
    rope_base, rope_extra = _rope(layers, what)
    version_2 = own.get("conv_kernel_size") is not None or own.get("selector_rank") is not None
    default_head_size = 128 if layers.get("model_type") == "qwen3" else n_embd // n_head
    return DFlashConfig(
        n_embd=n_embd,
        vocab_size=need(layers, "vocab_size"),
        intermediate_size=need(layers, "intermediate_size"),
        n_head=n_head,
        n_query_groups=layers.get("num_key_value_heads") or n_head,
        head_size=layers.get("head_dim") or default_head_size,
        taps=_taps(raw, own, what, n_layer, count),
        block_size=own.get("block_size") or (8 if nested is not None else 16),
        mask_token_id=need(own, "mask_token_id"),
        windows=windows,
        causal=causal,
        norm_eps=layers.get("rms_norm_eps") or 1e-6,
        rope_base=rope_base,
        rope_extra=rope_extra,
        attention_bias=bool(layers.get("attention_bias")),
        sample_from_anchor=bool(own.get("sample_from_anchor")),
        embedding_scale=float(own.get("input_embedding_scale") or 1),
        output_multiplier=float(own.get("output_multiplier") or 1),
        softcap=own.get("final_logit_softcapping"),
        draft_vocab_size=None if full_vocabulary else need(own, "draft_vocab_size"),
        conv_kernel_size=need(own, "conv_kernel_size") if version_2 else 0,
        conv_group_size=need(own, "conv_group_size") if version_2 else 16,
        selector_rank=need(own, "selector_rank") if version_2 else 0,
        selector_top_k=need(own, "selector_top_k") if version_2 else 0,
    )


def _need(what: str, fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise InputError(f"{what} has no {name} in its {CONFIG}, which is required.")
    return fields[name]


def _taps(
    raw: Mapping[str, Any], own: Mapping[str, Any], what: str, n_layer: int | None, count: int
) -> tuple[int, ...]:
    """Blocks of the target, 0-based. Both formats use the last state after the final norm, as transformers does."""
    if "aux_hidden_state_layer_ids" in raw:
        ids = [i - 1 for i in _need(what, raw, "aux_hidden_state_layer_ids")]
        if -1 in ids:
            raise InputError(
                f"{what} reads the target's embedding (layer id 0); litspec supports only the outputs of blocks."
            )
    elif own.get("target_layer_ids") is not None:
        ids = list(own["target_layer_ids"])
    else:
        # The default of the reference implementation.
        total = _need(what, own, "num_target_layers")
        spread = total - 4
        ids = [total // 2] if count == 1 else [round(1 + i * spread / (count - 1)) for i in range(count)]
    return tuple(-1 if i + 1 == n_layer else i for i in ids)


def _attention(
    raw: Mapping[str, Any], layers: Mapping[str, Any], own: Mapping[str, Any], count: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """For each layer, its window and whether its attention is causal within a block."""
    sliding = [kind == "sliding_attention" for kind in layers.get("layer_types") or ["full_attention"] * count]
    # Qwen3's configuration ignores `sliding_window` unless `use_sliding_window` is true.
    has_window = layers.get("use_sliding_window", layers.get("model_type") != "qwen3")
    window = layers.get("sliding_window") if has_window else None
    if "transformer_layer_config" in raw:
        # dflash2 is bidirectional by default.
        both_ways = raw.get("sliding_window_non_causal", raw.get("speculators_model_type") == "dflash2")
        causal = [is_sliding and not both_ways for is_sliding in sliding]
    else:
        said = own.get("is_causal")
        causal = sliding if said is None else [bool(said)] * count
    return tuple(window if is_sliding else None for is_sliding in sliding), tuple(causal)


def _rope(layers: Mapping[str, Any], what: str) -> tuple[float, dict[str, Any] | None]:
    """Base and adjustments of the rotary embedding, from the fields of old and new transformers."""
    fields = {**(layers.get("rope_scaling") or {}), **(layers.get("rope_parameters") or {})}
    # Some families have fields per layer type; the reference uses those of sliding layers.
    fields = fields.get("sliding_attention", fields)
    base = float(fields.get("rope_theta") or layers.get("rope_theta") or 10000)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, {"factor": fields["factor"]}
    if kind == "llama3":
        return base, {
            "factor": fields["factor"],
            "low_freq_factor": fields["low_freq_factor"],
            "high_freq_factor": fields["high_freq_factor"],
            "original_max_seq_len": fields["original_max_position_embeddings"],
        }
    raise InputError(f"{what} has rope_type {kind!r}; litspec supports default, linear and llama3 in DFlash drafters.")


def _own_name(name: str) -> str:
    """Removes `.weight` from the names of codebooks, which are published with and without it."""
    return name.removesuffix(".weight") if name.removesuffix(".weight") in CODEBOOKS else name


def _check_names(network: DFlashNetwork, weights: Mapping[str, Tensor], what: str) -> None:
    wanted = network.state_dict()
    for name, tensor in wanted.items():
        if name not in weights:
            raise InputError(f"{what} lacks the weight {name!r}, which its {CONFIG} requires.")
        if weights[name].shape != tensor.shape:
            raise InputError(
                f"{what} has {name!r} of shape {tuple(weights[name].shape)}, but its {CONFIG} requires "
                f"{tuple(tensor.shape)}."
            )
    if unknown := [name for name in weights if name not in wanted]:
        raise InputError(f"{what} has a weight {unknown[0]!r} that litspec does not know.")


def _check_map(d2t: Tensor, config: DFlashConfig, what: str) -> None:
    ids = d2t + torch.arange(d2t.size(0), device=d2t.device)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise InputError(
            f"{what} maps its vocabulary (d2t) to ids from {int(ids.min())} to {int(ids.max())}, but the target's are "
            f"below {config.vocab_size}."
        )
    if ids.unique().numel() != ids.numel():
        raise InputError(f"{what} maps several ids of its vocabulary (d2t) to the same id of the target.")
