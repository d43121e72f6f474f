"""Tiny random checkpoints of every family of models, each with a reference that is not our own code.

If LitGPT reads a family from Hugging Face, the reference is the `transformers` model, saved and run through LitGPT's
own converter; else it is LitGPT's `GPT` without a cache.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import litgpt.model
import torch
import transformers
from litgpt.config import Config
from litgpt.scripts import convert_hf_checkpoint as convert
from safetensors.torch import load_file
from torch import Tensor

from litspec.model import GPT

VOCAB = 128
WINDOW = 16

# What LitGPT's config and transformers' config call the same sizes.
_SIZES = {
    "block_size": 4096,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": VOCAB,
    "padded_vocab_size": VOCAB,
}
_HF_SIZES = {
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """How to build one family at toy size.

    Attributes:
        litgpt: name of a LitGPT config, and what differs at toy size.
        hf: transformers' config and model class, and what differs; None: LitGPT itself is the reference.
        copy: LitGPT's converter, called with (config, qkv_weights, state_dict, hf_weights).
    """

    litgpt: tuple[str, dict]
    hf: tuple[str, dict] | None = None
    copy: Callable | None = None


def _llama(config: Config, qkv: dict, sd: dict, hf: dict) -> None:
    convert.copy_weights_hf_llama(config, qkv, sd, hf)


def _neox(config: Config, qkv: dict, sd: dict, hf: dict) -> None:
    convert.copy_weights_gpt_neox(config, sd, hf)


def _falcon(config: Config, qkv: dict, sd: dict, hf: dict) -> None:
    convert.copy_weights_falcon(config, sd, hf)


def _gemma_2(config: Config, qkv: dict, sd: dict, hf: dict) -> None:
    convert.copy_weights_gemma_2(qkv, sd, hf)


def _gemma_3(config: Config, qkv: dict, sd: dict, hf: dict) -> None:
    convert.copy_weights_gemma_3(qkv, sd, hf, config=config)


_GQA = {"n_query_groups": 2, "intermediate_size": 128}
_HF_GQA = {"num_key_value_heads": 2, "intermediate_size": 128}
_LLAMA_3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES: dict[str, Family] = {
    "llama-3": Family(
        ("Llama-3.2-1B", _GQA | {"rope_adjustments": _LLAMA_3_ROPE | {"original_max_seq_len": 32}}),
        (
            "Llama",
            _HF_GQA
            | {
                "rope_theta": 500000.0,
                "rope_scaling": _LLAMA_3_ROPE | {"rope_type": "llama3", "original_max_position_embeddings": 32},
                "rms_norm_eps": 1e-5,
            },
        ),
        _llama,
    ),
    "llama-2": Family(
        ("Llama-2-7b-hf", {"intermediate_size": 128}),
        ("Llama", {"intermediate_size": 128, "rms_norm_eps": 1e-5}),
        _llama,
    ),
    "qwen-2.5": Family(
        ("Qwen2.5-0.5B", _GQA),
        ("Qwen2", _HF_GQA | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}),
        convert.copy_weights_qwen_2_5,
    ),
    "qwen-3": Family(
        ("Qwen3-0.6B", _GQA | {"head_size": 32}),
        ("Qwen3", _HF_GQA | {"head_dim": 32, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}),
        convert.copy_weights_qwen_3,
    ),
    "qwen-3-moe": Family(
        (
            "Qwen3-30B-A3B",
            _GQA | {"head_size": 32, "moe_intermediate_size": 32, "n_expert": 8, "n_expert_per_token": 3},
        ),
        (
            "Qwen3Moe",
            _HF_GQA
            | {
                "head_dim": 32,
                "moe_intermediate_size": 32,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "norm_topk_prob": True,
                "rope_theta": 1000000.0,
                "rms_norm_eps": 1e-6,
            },
        ),
        convert.copy_weights_qwen_3,
    ),
    "gemma-1": Family(
        ("Gemma-2b", {"n_query_groups": 1, "intermediate_size": 128}),
        ("Gemma", {"num_key_value_heads": 1, "intermediate_size": 128, "head_dim": 16, "rms_norm_eps": 1e-5}),
        _llama,
    ),
    "gemma-2": Family(
        (
            "Gemma-2-2b",
            _GQA
            | {
                "head_size": 32,
                "attention_scores_scalar": 24,
                "sliding_window_size": WINDOW,
                "sliding_window_indices": [1, 0],
                "attention_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
            },
        ),
        (
            "Gemma2",
            _HF_GQA
            | {
                "head_dim": 32,
                "query_pre_attn_scalar": 24,
                "sliding_window": WINDOW,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "rms_norm_eps": 1e-5,
            },
        ),
        _gemma_2,
    ),
    "gemma-3": Family(
        (
            "Gemma-3-1b-it",
            _GQA
            | {
                "head_size": 32,
                "attention_scores_scalar": 24,
                "sliding_window_size": WINDOW,
                "sliding_window_indices": [1, 0],
                "rope_indices": [1, 0],
            },
        ),
        (
            "Gemma3Text",
            _HF_GQA
            | {
                "head_dim": 32,
                "query_pre_attn_scalar": 24,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
                "rms_norm_eps": 1e-5,
            },
        ),
        _gemma_3,
    ),
    "mistral": Family(
        ("Mistral-7B-v0.1", _GQA | {"sliding_window_size": WINDOW}),
        ("Mistral", _HF_GQA | {"sliding_window": WINDOW, "rms_norm_eps": 1e-5}),
        _llama,
    ),
    "phi-2": Family(
        ("phi-2", {}),
        ("Phi", {"partial_rotary_factor": 0.4, "intermediate_size": 256, "layer_norm_eps": 1e-5}),
        convert.copy_weights_phi,
    ),
    "phi-3": Family(
        ("Phi-3-mini-4k-instruct", {"intermediate_size": 128, "sliding_window_size": WINDOW}),
        ("Phi3", {"intermediate_size": 128, "sliding_window": WINDOW, "rms_norm_eps": 1e-5}),
        convert.copy_weights_phi,
    ),
    "phi-4": Family(
        ("phi-4", _GQA),
        ("Phi3", _HF_GQA | {"rope_theta": 250000.0, "rms_norm_eps": 1e-5}),
        convert.copy_weights_phi,
    ),
    "olmo-1": Family(
        ("OLMo-1B-hf", {"intermediate_size": 128}),
        ("Olmo", {"intermediate_size": 128}),
        _llama,
    ),
    "olmo-2": Family(
        ("OLMo-2-1124-7B", {"n_query_groups": 4, "intermediate_size": 128}),
        ("Olmo2", {"intermediate_size": 128, "rope_theta": 500000.0, "rms_norm_eps": 1e-6}),
        convert.copy_weights_olmo2,
    ),
    "pythia": Family(
        ("pythia-14m", {}),
        ("GPTNeoX", {"intermediate_size": 256, "rotary_pct": 0.25, "layer_norm_eps": 1e-5}),
        _neox,
    ),
    "falcon": Family(
        ("falcon-7b", {}),
        ("Falcon", {"multi_query": True, "parallel_attn": True, "bias": False, "tie_word_embeddings": False}),
        _falcon,
    ),
    "stablelm": Family(
        ("stablelm-3b-4e1t", {"intermediate_size": 128}),
        ("StableLm", {"intermediate_size": 128, "num_key_value_heads": 4, "partial_rotary_factor": 0.25}),
        _llama,
    ),
    "mixtral": Family(
        ("Mixtral-8x7B-v0.1", _GQA | {"n_expert": 4, "n_expert_per_token": 2}),
        (
            "Mixtral",
            _HF_GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
        ),
        _llama,
    ),
    "smollm-2": Family(
        ("SmolLM2-135M", _GQA),
        ("Llama", _HF_GQA | {"rope_theta": 100000.0, "rms_norm_eps": 1e-5}),
        _llama,
    ),
    # LitGPT has the layers of DeepSeek-V3 but no name or converter for it.
    "latent": Family(
        (
            "",
            {
                "intermediate_size": 128,
                "rotary_percentage": 1.0,
                "parallel_residual": False,
                "bias": False,
                "norm_class_name": "RMSNorm",
                "mlp_class_name": "LLaMAMoE",
                "moe_intermediate_size": 32,
                "n_expert": 8,
                "n_shared_expert": 1,
                "n_expert_groups": 4,
                "n_topk_groups": 2,
                "n_topk_scores_per_group": 1,
                "n_expert_per_token": 2,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "rope_interleave": True,
                "latent_attention": {
                    "q_lora_rank": 32,
                    "kv_lora_rank": 32,
                    "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16,
                    "v_head_dim": 16,
                },
            },
        )
    ),
}


@torch.no_grad()
def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights that make attention peaked and logits of size one, so that a wrong mask or rotation shows."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias") or (isinstance(tensor, torch.nn.Parameter) and tensor.dim() == 1):
            tensor.add_(0.1 * noise)
        elif isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(noise * 1.5 * tensor.size(-1) ** -0.5)


@functools.cache
def build(name: str, seed: int = 0) -> tuple[Config, dict[str, Tensor], torch.nn.Module]:
    """A family at toy size: LitGPT config, weights by LitGPT's names (float32), and the model they come from."""
    family = FAMILIES[name]
    base, changes = family.litgpt
    kwargs = _SIZES | ({"head_size": 16} if "head_size" not in changes else {}) | changes
    config = Config.from_name(base, **kwargs) if base else Config(name=name, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    if family.hf is None:
        model = litgpt.model.GPT(config).eval()
        randomise(model, generator)
        return config, model.state_dict(), model

    hf_name, hf_changes = family.hf
    config_class = getattr(transformers, f"{hf_name}Config")
    model_class = getattr(transformers, f"{hf_name.removesuffix('Text')}ForCausalLM")
    model = model_class(config_class(**_HF_SIZES | hf_changes, attn_implementation="eager")).eval()
    randomise(model, generator)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        hf_weights = load_file(Path(folder) / "model.safetensors")
    state_dict: dict[str, Tensor] = {}
    family.copy(config, {}, state_dict, hf_weights)
    return config, state_dict, model


def tiny(name: str, seed: int = 0) -> tuple[Config, dict[str, Tensor], Callable[[Tensor], Tensor]]:
    """A family's LitGPT config and weights, and its reference: tokens `(B, T)` to logits `(B, T, V)`, uncached."""
    config, state_dict, model = build(name, seed)

    @torch.no_grad()
    def reference(idx: Tensor) -> Tensor:
        logits = model(idx)
        return getattr(logits, "logits", logits)

    return config, state_dict, reference


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> GPT:
    """Our model of a family at toy size."""
    config, state_dict, _ = build(name, seed)
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict({key: value.to(dtype) for key, value in state_dict.items()}, assign=True)
    return model.eval()
