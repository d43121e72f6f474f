"""Tiny checkpoint folders as LitGPT writes them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import litgpt.model
import torch
from litgpt.config import Config
from litgpt.utils import save_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

EOS = "<|end|>"
BOS = "<|begin|>"


def tiny_config(**fields: Any) -> Config:
    """A two-layer Llama of 32 channels with grouped queries, over `byte_level_tokenizer()`."""
    defaults: dict[str, Any] = {
        "name": "tiny-llama-test",
        "block_size": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_query_groups": 2,
        "n_embd": 32,
        "vocab_size": 258,
        "padded_vocab_size": 264,
        "intermediate_size": 64,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "bias": False,
        "parallel_residual": False,
        "rotary_percentage": 1.0,
    }
    return Config(**(defaults | fields))


def byte_level_tokenizer(special: tuple[str, ...] = (EOS, BOS), words: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE without merges: the 256 bytes in the order of their characters, then words, then specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def random_weights(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of LitGPT's own model with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {name: tensor.to(dtype) for name, tensor in litgpt.model.GPT(config).state_dict().items()}


def lively_weights(config: Config, *, seed: int = 0) -> dict[str, Tensor]:
    """`random_weights` with larger layer weights, so that greedy texts do not soon repeat themselves."""
    weights = random_weights(config, seed=seed)
    return {name: 3 * tensor if "attn" in name or "mlp" in name else tensor for name, tensor in weights.items()}


def write_checkpoint(
    folder: Path,
    config: Config | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    weights: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    wrapped: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | str | None = None,
) -> Path:
    """Writes a checkpoint folder as LitGPT does.

    Args:
        folder: The folder; it is created.
        config: The model; None: `tiny_config()`.
        tokenizer: None: `byte_level_tokenizer()`.
        weights: What `lit_model.pth` holds; None: random weights that fit the config.
        seed: Seed of the random weights.
        dtype: Dtype of the random weights.
        wrapped: Save `{"model": weights}`, as full finetuning does.
        tokenizer_config: Replaces or adds to the fields of `tokenizer_config.json`.
        generation_config: A dict, or raw text that need not be JSON; None: no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config or tiny_config()
    save_config(config, folder)
    weights = random_weights(config, seed=seed, dtype=dtype) if weights is None else weights
    torch.save({"model": weights} if wrapped else weights, folder / "lit_model.pth")
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": BOS, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | (tokenizer_config or {})), encoding="utf-8")
    if generation_config is not None:
        text = generation_config if isinstance(generation_config, str) else json.dumps(generation_config)
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def write_pair(folder: Path, config: Config, noise: float) -> tuple[Path, Path]:
    """A random target and a draft that sometimes agrees with it: the same weights with noise."""
    weights = lively_weights(config)
    generator = torch.Generator().manual_seed(0)
    noisy = {name: w + noise * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    return (
        write_checkpoint(folder / "target", config, weights=weights),
        write_checkpoint(folder / "draft", config, weights=noisy),
    )
