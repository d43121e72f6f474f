"""Hugging Face folders: finds the name of the model in LitGPT, and runs LitGPT's own converter."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from litgpt.config import name_to_config

from litspec.errors import InputError

WEIGHTS = "lit_model.pth"
# Prefixes of LitGPT's model names, by Hugging Face's architecture; LitGPT's converter uses them too. An empty prefix
# stands for all names that have none of the other prefixes.
_NAMES: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("",),
    "MistralForCausalLM": ("mistral", "mathstral"),
    "MixtralForCausalLM": ("mixtral",),
    "Qwen2ForCausalLM": ("qwen2.5", "qwq"),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3",),
    "GemmaForCausalLM": ("gemma", "codegemma"),
    "Gemma2ForCausalLM": ("gemma-2",),
    "Gemma3ForCausalLM": ("gemma-3",),
    "PhiForCausalLM": ("phi",),
    "Phi3ForCausalLM": ("phi",),
    "Olmo2ForCausalLM": ("olmo-2",),
    "GPTNeoXForCausalLM": ("pythia", "redpajama", "dolly", "stablelm"),
    "FalconForCausalLM": ("falcon",),
}
# Sizes that must agree: Hugging Face's name, LitGPT's.
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "intermediate_size": "intermediate_size",
    "vocab_size": "padded_vocab_size",
    "head_dim": "head_size",
    "num_experts": "n_expert",
    "num_local_experts": "n_expert",
}


def model_name(folder: Path) -> str | None:
    """The name that LitGPT has for the model of a Hugging Face folder, by the sizes in its `config.json`.

    If several have these sizes (a base model and its chat version), the one whose name is most similar to the folder's
    is chosen; then one with the same context length; then a chat version if the folder has a chat template, else a base
    model.

    Returns:
        None if LitGPT has no model of this architecture with these sizes.
    """
    hf = _read(folder / "config.json")
    families = [family for name in hf.get("architectures") or [] for family in _NAMES.get(str(name), ())]
    if not families:
        return None
    found = [name for name, config in name_to_config.items() if _is_of(name, families) and _fits(config, hf)]
    tuned = (
        bool(_read(folder / "tokenizer_config.json").get("chat_template")) or (folder / "chat_template.jinja").is_file()
    )

    def likeness(name: str) -> tuple[float, bool, bool, int]:
        hub = hf.get("_name_or_path") or ""
        same = max(SequenceMatcher(None, name.lower(), each.lower()).ratio() for each in (folder.name, str(hub)))
        exact = name.lower() in (folder.name.lower(), str(hub).rpartition("/")[2].lower())
        is_tuned = any(mark in name.lower() for mark in ("instruct", "chat", "-it", "zephyr"))
        length = name_to_config[name].get("block_size") == hf.get("max_position_embeddings")
        # A folder name that is unlike any model's name says little.
        return float(exact) + (same if same > 0.6 else 0.0), length, is_tuned == tuned, -len(name)

    return max(found, key=likeness, default=None)


def command_for(folder: Path) -> str:
    """The end of a sentence: the command that converts the folder, or why there is none."""
    if (name := model_name(folder)) is not None:
        return (
            f"convert it with `litgpt convert_to_litgpt {folder} --model_name {name}`, or have it converted with "
            "`--convert true`"
        )
    hf = _read(folder / "config.json")
    named = ", ".join(map(str, hf.get("architectures") or []))
    sizes = ", ".join(f"{key} {hf[key]}" for key in _SIZES if isinstance(hf.get(key), int))
    command = f"`litgpt convert_to_litgpt {folder} --model_name NAME` (`litgpt download list` shows the names)"
    if not named:
        return f"no config.json names a model; run {command}"
    seen = f"config.json names {named}" + (f" with {sizes}" if sizes else "")
    return f"{seen}, which is none of the models that LitGPT lists; if it is one of them, run {command}"


def convert(folder: Path, role: str) -> None:
    """Converts a Hugging Face folder in place with LitGPT's converter. It writes lit_model.pth and model_config.yaml.

    Raises:
        InputError: LitGPT has no such model, or its converter fails; then neither file is left behind.
    """
    name = model_name(folder)
    if name is None:
        raise InputError(f"{role} {str(folder)!r} cannot be converted: {command_for(folder)}.")
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    new = [path for path in (folder / WEIGHTS, folder / "model_config.yaml") if not path.exists()]
    print(f"Converting {folder} as LitGPT's {name} ...", file=sys.stderr, flush=True)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for texts
            convert_hf_checkpoint(folder, model_name=name)
    except BaseException as error:
        for path in new:
            with suppress(OSError):
                path.unlink()
        if not isinstance(error, Exception):
            raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"{role} {str(folder)!r} cannot be converted as LitGPT's {name}: {reason[:200]}.") from error


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder holds weights in Hugging Face's formats."""
    return any(path.name.endswith((".safetensors", ".bin", ".index.json")) for path in folder.iterdir())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_of(name: str, families: list[str]) -> bool:
    lower = name.lower()
    others = [start for starts in _NAMES.values() for start in starts if start]
    return any(lower.startswith(one) if one else not lower.startswith(tuple(others)) for one in families)


def _fits(config: Mapping[str, Any], hf: Mapping[str, Any]) -> bool:
    from litgpt.config import Config

    try:
        made = Config(**config)
    except (TypeError, ValueError, AssertionError):
        return False
    for theirs, ours in _SIZES.items():
        value, own = hf.get(theirs), getattr(made, ours)
        if ours == "intermediate_size" and made.moe_intermediate_size:
            continue  # a mixture of experts may have this size without using it
        if isinstance(value, int) and value != own:
            return False
    base = hf.get("rope_theta") or (hf.get("rope_parameters") or {}).get("rope_theta")
    if base is not None and float(base) != float(made.rope_base):
        return False
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    return factor is None or factor == (made.rope_adjustments or {}).get("factor", made.rope_condense_ratio)
