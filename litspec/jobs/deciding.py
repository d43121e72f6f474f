"""What the texts of a job depend on. A job is resumed only if all of it is unchanged."""

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
from litspec.config import names_of
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.drafters.folders import CONFIG, kind_of, open_published, resolve
from litspec.errors import InputError
from litspec.jobs.disk import digest, reading
from litspec.jobs.prompts import Prompts
from litspec.llm import SpecLLM
from litspec.placement import TensorParallel
from litspec.sampling import Sampling
from litspec.text import TextCodec

# `resolved` adds those placement settings that change bits. Drafting settings choose the proposals: texts depend on
# them with the rejection sampler only.
PLACING, DRAFTING = names_of("placing"), names_of("proposals")

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
    """A hash of all that texts depend on in a checkpoint. Reads less than a megabyte of its weights.

    The small files are hashed as a whole. `lit_model.pth` is a zip archive whose table of contents holds the size and
    the CRC-32 of every tensor, which differ for other weights. In case the file was saved without checksums, its size
    and 64 blocks spread over it are hashed too. Not detected: a file changed in place whose checksums were not updated.
    """
    parts: list[bytes | str] = []
    for name in CHECKPOINT_FILES:
        path = checkpoint.dir / name
        with reading(path):
            parts += [name, path.read_bytes() if path.is_file() else b""]
    with reading(checkpoint.weights), open(checkpoint.weights, "rb") as file:
        parts += _table_of_contents(file, checkpoint)
        parts += _samples(file)
    return digest(*parts)


def _table_of_contents(file: BinaryIO, checkpoint: Checkpoint) -> list[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            return [f"{item.filename} {item.file_size} {item.CRC}" for item in archive.infolist()]
    except OSError:
        raise
    except Exception as error:  # a damaged archive can raise almost any exception
        raise InputError(
            f"{str(checkpoint.weights)!r} ({checkpoint.role}) is damaged: its table of contents cannot be read "
            f"({' '.join(str(error).split())}); download or convert the checkpoint again."
        ) from error


def draft_digest(draft_dir: str | Path, may_convert: bool = False) -> str:
    """A hash of all that texts depend on in draft_dir, a checkpoint (see `open_checkpoint`) or a published drafter."""
    if kind_of(draft_dir) == "litgpt":
        return checkpoint_digest(open_checkpoint(draft_dir, role="draft_dir", may_convert=may_convert))
    folder = resolve(draft_dir)
    with reading(folder / CONFIG):
        parts: list[bytes | str] = [(folder / CONFIG).read_bytes()]
    for path in sorted(path for path in set(open_published(folder).files.values()) if path.is_file()):
        with reading(path), open(path, "rb") as file:
            parts += [path.name, *_samples(file)]
    return digest(*parts)


def _samples(file: BinaryIO) -> list[bytes | str]:
    """A file's size, and `BLOCKS` blocks spread evenly over it."""
    size = file.seek(0, os.SEEK_END)
    parts: list[bytes | str] = [str(size)]
    for i in range(BLOCKS):
        file.seek(size * i // BLOCKS)
        parts.append(file.read(BLOCK_BYTES))
    return parts


def deciding(prompts: Prompts, load: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the texts and are known before the models are loaded, by name, as JSON values.

    A setting that this module does not list as harmless is assumed to decide the texts.

    Args:
        prompts: The prompts.
        load: All arguments of `SpecLLM.load`.
        settings: All arguments of `SpecLLM.generate`.
    """
    given = {**load, **settings}
    found = {name: value for name, value in given.items() if name not in (*PLACING, *DRAFTING)}
    embedded = load["checkpoint_dir"] is None
    may_convert = bool(load.get("convert"))
    target = open_checkpoint(DEMO_TARGET if embedded else load["checkpoint_dir"], may_convert=may_convert)
    found |= {
        "prompts_file": prompts.digest,
        "num_samples": prompts.num_samples,
        "checkpoint_dir": checkpoint_digest(target),
    }
    found |= _decided_by_folder(TextCodec(target.dir, target.config))
    if depends_on_proposals(prompts, settings):
        draft = DEMO_DRAFT if embedded else load["draft_dir"]
        wanted = draft is not None and load["drafter"] in ("auto", "draft_model")
        draft = draft_digest(draft, may_convert) if wanted else None
        found |= {name: given[name] for name in DRAFTING if name != "drafter"} | {"draft_dir": draft}
    return json.loads(json.dumps(found, default=str))


def _decided_by_folder(codec: TextCodec) -> dict[str, Any]:
    """What LitGPT derives from a folder's files and from its name: BOS, prompt style and stop tokens."""
    style = codec.prompt_style
    rendered = [style.apply("a prompt", sys_prompt=given) for given in (None, "a system prompt")]
    return {
        "bos": bool(codec.tokenizer.use_bos),
        "prompt_style": f"{type(style).__module__}.{type(style).__qualname__}",
        "prompt_template": digest(*map(str, rendered)),
        "stop_tokens": sorted(codec.stop_tokens),
    }


def resolved(llm: SpecLLM, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of what decides the texts: properties of the loaded models.

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
            # A draft on another device draws its own random numbers.
            found["draft_device"] = "the target's" if device == placed.device else device.type
    return found


def depends_on_proposals(prompts: Prompts, settings: Mapping[str, Any]) -> bool:
    """Whether any text is sampled by the rejection sampler; only such texts depend on the proposals."""
    if settings["sampler"] == "coupled":
        return False
    ranges = [(settings["temperature"], settings["top_p"])]
    for number in range(0, len(prompts), prompts.num_samples):
        if own := prompts[number].settings:
            given = {**settings, **own}
            ranges.append((given["temperature"], given["top_p"]))
    for temperature, top_p in dict.fromkeys(ranges):
        with suppress(InputError):  # such a line becomes an error
            if not Sampling(temperature, None, top_p).greedy:
                return True
    return False


def refuse_other(out: Path, begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares the settings of an earlier run with the current ones, as far as these are known.

    Raises:
        InputError: They differ. The message names all that changed.
    """
    hashed = {
        "prompts_file": "the content of prompts_file",
        "checkpoint_dir": "the checkpoint in checkpoint_dir",
        "draft_dir": "the checkpoint in draft_dir",
        "prompt_template": "the output of the prompt style",
    }
    changed = [
        hashed.get(name) or f"{name} (then {_shown(begun.get(name))}, now {_shown(value)})"
        for name, value in wanted.items()
        if begun.get(name) != value
    ]
    if changed:
        raise InputError(
            f"{str(out)!r} cannot be resumed because {', '.join(changed)} changed; use the same settings as before, or "
            "another out_file."
        )


def _shown(value: Any, limit: int = 200) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _precision(model: torch.nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
