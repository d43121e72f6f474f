"""What the texts of a job depend on. A job goes on only as it began: else its file would be the work of two."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from litspec.checkpoint import Checkpoint, open_checkpoint
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.drafters.folders import CONFIG, kind_of, open_published, resolve
from litspec.errors import InputError
from litspec.jobs.disk import digest
from litspec.jobs.prompts import Prompts
from litspec.llm import SpecLLM
from litspec.placement import TensorParallel
from litspec.sampling import Sampling

# Where and how fast; `resolved` adds what of it changes bits.
PLACING = ("accelerator", "devices", "num_nodes", "placement", "precision", "draft_precision", "draft_device")
# These choose the proposals. Texts depend on them where proposals are accepted by rejection sampling, and only there.
DRAFTING = ("draft_dir", "drafter", "exit_layer", "draft_placement", "speculative_k")

CHECKPOINT_FILES = (
    "model_config.yaml",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "generation_config.json",
    "prompt_style.yaml",
)
BLOCKS, BLOCK_BYTES = 64, 4096


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """A hash of all that texts depend on in a checkpoint; reads under a megabyte of its weights.

    The small files count whole. `lit_model.pth` is a zip archive whose table of contents holds the size and the CRC-32
    of every tensor: weights that were trained, merged or converted otherwise have others. In case these were left out
    when it was saved, its size and 64 blocks from all over it count too. What slips through is a file damaged in place,
    behind the back of its own checksums.
    """
    parts: list[bytes | str] = []
    for name in CHECKPOINT_FILES:
        path = checkpoint.dir / name
        parts += [name, path.read_bytes() if path.is_file() else b""]
    with open(checkpoint.weights, "rb") as file:
        with zipfile.ZipFile(file) as archive:
            parts += [f"{item.filename} {item.file_size} {item.CRC}" for item in archive.infolist()]
        parts += _samples(file)
    return digest(*parts)


def draft_digest(draft_dir: str | Path) -> str:
    """The same of what draft_dir holds, a checkpoint or a published drafter."""
    if kind_of(draft_dir) == "litgpt":
        return checkpoint_digest(open_checkpoint(draft_dir, role="draft_dir"))
    folder = resolve(draft_dir)
    parts: list[bytes | str] = [(folder / CONFIG).read_bytes()]
    for path in sorted(set(open_published(folder).files.values())):
        with open(path, "rb") as file:
            parts += [path.name, *_samples(file)]
    return digest(*parts)


def _samples(file: BinaryIO) -> list[bytes | str]:
    """A file's size, and blocks from all over it."""
    size = file.seek(0, os.SEEK_END)
    parts: list[bytes | str] = [str(size)]
    for i in range(BLOCKS):
        file.seek(size * i // BLOCKS)
        parts.append(file.read(BLOCK_BYTES))
    return parts


def deciding(prompts: Prompts, load: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the texts and is known before the models are loaded, by name; values as JSON has them.

    A setting that this module has not heard of is taken to be one that does.

    Args:
        prompts: The prompts.
        load: All arguments of `SpecLLM.load`.
        settings: All arguments of `SpecLLM.generate`.
    """
    given = {**load, **settings}
    found = {name: value for name, value in given.items() if name not in (*PLACING, *DRAFTING)}
    embedded = load["checkpoint_dir"] is None
    target = open_checkpoint(DEMO_TARGET if embedded else load["checkpoint_dir"])
    found |= {
        "prompts_file": prompts.digest,
        "num_samples": prompts.num_samples,
        "checkpoint_dir": checkpoint_digest(target),
    }
    if depends_on_proposals(prompts, settings):
        draft = DEMO_DRAFT if embedded else load["draft_dir"]
        wanted = draft is not None and load["drafter"] in ("auto", "draft_model")
        draft = draft_digest(draft) if wanted else None
        found |= {name: given[name] for name in DRAFTING if name != "drafter"} | {"draft_dir": draft}
    return json.loads(json.dumps(found, default=str))


def resolved(llm: SpecLLM, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of what decides the texts, which the loaded models tell.

    Args:
        llm: The loaded pair.
        wanted: What `deciding` returned.
    """
    placed = llm.placed
    found = {
        "precision": _precision(placed.model),
        "device": placed.device.type,
        "tensor_parallel": placed.world_size if isinstance(placed, TensorParallel) else 1,
    }
    if "draft_dir" in wanted:
        found["drafter"] = type(llm.drafter).__name__
        if placed.draft_model is not None:
            device = next(placed.draft_model.parameters()).device
            found["draft_precision"] = _precision(placed.draft_model)
            # On another device it draws its random numbers apart.
            found["draft_device"] = "the target's" if device == placed.device else device.type
    return found


def depends_on_proposals(prompts: Prompts, settings: Mapping[str, Any]) -> bool:
    """Whether a text is sampled, and not by the coupled sampler."""
    if settings["sampler"] == "coupled":
        return False
    ranges = [(settings["temperature"], settings["top_p"])]
    for number in range(0, len(prompts), prompts.num_samples):
        if own := prompts[number].settings:
            given = {**settings, **own}
            ranges.append((given["temperature"], given["top_p"]))
    for temperature, top_p in dict.fromkeys(ranges):
        with suppress(InputError):  # such a line will be an error
            if not Sampling(temperature, None, top_p).greedy:
                return True
    return False


def refuse_other(out: Path, begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares what decided the texts so far with what is to decide the others, or as much as is known of that.

    Raises:
        InputError: A sentence that names all that differs.
    """
    hashed = {
        "prompts_file": "the content of prompts_file",
        "checkpoint_dir": "the checkpoint in checkpoint_dir",
        "draft_dir": "the checkpoint in draft_dir",
    }
    changed = [
        hashed.get(name) or f"{name} (then {begun.get(name)!r}, now {value!r})"
        for name, value in wanted.items()
        if begun.get(name) != value
    ]
    if changed:
        raise InputError(
            f"{str(out)!r} was begun otherwise and cannot be resumed: {', '.join(changed)} changed; give the same as "
            "then, or another out_file."
        )


def _precision(model: torch.nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
