"""Folders of published drafters: detects the kind of drafter, reads the files, makes the drafter.

A folder holds `config.json` and weights: safetensors (one file, or several with or without an index) or a
`pytorch_model.bin`. The latter is read as tensors only, so that it cannot run code.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from litgpt.utils import extend_checkpoint_dir
from safetensors import SafetensorError, safe_open
from torch import Tensor

from litspec.checkpoint import WEIGHTS
from litspec.errors import InputError

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter
    from litspec.model import GPT

Kind = Literal["litgpt", "dflash", "eagle", "mtp", "assistant"]

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
# The function that makes each kind of drafter from the folder and the target's model; imported when needed.
LOADERS: dict[Kind, str] = {
    "dflash": "litspec.drafters.dflash_folder:load_dflash",
    "eagle": "litspec.drafters.eagle:load_eagle",
    "mtp": "litspec.drafters.mtp:load_mtp",
    "assistant": "litspec.drafters.assistant:load_assistant",
}
# Patterns that identify a kind in `architectures` and `speculators_model_type`.
_NAMES: tuple[tuple[str, Kind], ...] = (
    (r"eagle", "eagle"),
    (r"dflash", "dflash"),
    (r"mtp|nextn", "mtp"),
    (r"gemma4\w*assistant", "assistant"),
)
# Patterns that identify a kind in the names of weights, if the config does not.
_MTP = r"(^|\.)(mtp|mtp_layers|nextn)\.|\.(enorm|eh_proj|token_layernorm)\."
_WEIGHT_NAMES: tuple[tuple[str, Kind], ...] = (
    (r"^(model\.)?midlayer\.", "eagle"),
    (r"^layers\.0\.hidden_norm\.", "eagle"),
    (r"^hidden_norm\.", "dflash"),
    (r"^pre_projection\.", "assistant"),
    (_MTP, "mtp"),
)
# Names of weights in an unconverted Hugging Face model, for which the checkpoint reader raises the error.
_WHOLE_MODEL = r"(^|\.)embed_tokens\.|^transformer\.|^gpt_neox\."


@dataclass(frozen=True)
class Published:
    """A folder whose config and list of weights have been read.

    Attributes:
        dir: The folder.
        config: Content of its `config.json`.
        files: The file of each weight. Files from which nothing is read may be missing.
        role: The flag that named the folder, for messages.
    """

    dir: Path
    config: dict[str, Any]
    files: dict[str, Path]
    role: str = "draft_dir"

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Reads weights to the CPU, in the dtypes of the files.

        Args:
            names: Names of the weights; None for all.

        Raises:
            InputError: A file is damaged.
        """
        wanted = set(self.files if names is None else names)
        found: dict[str, Tensor] = {}
        for path in sorted({self.files[name] for name in wanted}):
            if path.name == PICKLE:
                found |= {name: tensor for name, tensor in _unpickled(path, self.role).items() if name in wanted}
                continue
            with _safetensors(path, self.role) as file:
                found |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
        return found


def resolve(draft_dir: str | Path) -> Path:
    """The folder that a user named, as given or in `./checkpoints`."""
    return extend_checkpoint_dir(Path(draft_dir))


def kind_of(draft_dir: str | Path, target_dir: Path | None = None) -> Kind:
    """Detects the kind of drafter in a folder from its files.

    A folder with a LitGPT checkpoint or without `config.json` is "litgpt"; the checkpoint reader reports any errors.
    The target's own folder is "litgpt" too, unless it also holds MTP layers.

    Args:
        draft_dir: The folder.
        target_dir: The target's folder.

    Raises:
        InputError: The folder holds an unknown kind of drafter.
    """
    if not str(draft_dir) or "\0" in str(draft_dir):
        return "litgpt"
    folder = resolve(draft_dir)
    if not os.path.isfile(folder / CONFIG):
        return "litgpt"
    if os.path.exists(folder / WEIGHTS):
        own = target_dir is not None and os.path.samefile(folder, target_dir)
        return "mtp" if own and any(re.search(_MTP, name) for name in _weight_files(folder)) else "litgpt"
    config = _read_json(folder / CONFIG)
    declared = [
        config.get("speculators_model_type"),
        config.get("speculative_algorithm"),
        *(config.get("architectures") or []),
    ]
    named = [str(name) for name in declared if name]
    for pattern, kind in _NAMES:
        if any(re.search(pattern, name, re.IGNORECASE) for name in named):
            return kind
    names = _weight_files(folder)
    for pattern, kind in _WEIGHT_NAMES:
        if any(re.search(pattern, name) for name in names):
            return kind
    if not names or any(re.search(_WHOLE_MODEL, name) for name in names):
        return "litgpt"
    what = f"called {named[0]!r}" if named else "of an unknown kind"
    raise InputError(
        f"draft_dir {str(folder)!r} holds a drafter {what}; litspec reads LitGPT checkpoints and published DFlash, "
        "EAGLE-3 and MTP drafters and assistants."
    )


def open_published(draft_dir: str | Path, role: str = "draft_dir") -> Published:
    """Reads the configuration and the names of the weights of a published folder.

    Args:
        draft_dir: The folder.
        role: The flag that named it, for messages.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    folder = resolve(draft_dir)
    config, files = _read_json(folder / CONFIG, role), _weight_files(folder, role)
    if not files:
        raise InputError(f"{role} {str(folder)!r} has a {CONFIG} but no weights: no *.safetensors and no {PICKLE}.")
    return Published(folder, config, files, role)


def load_published(draft_dir: str | Path, kind: Kind, target: GPT) -> Drafter:
    """Makes the drafter of a folder.

    Args:
        draft_dir: The folder.
        kind: The kind of drafter, see `kind_of`; not "litgpt".
        target: The target's model.

    Raises:
        InputError: The folder cannot be used, or was made for another target.
    """
    module, _, function = LOADERS[kind].partition(":")
    load: Callable[[Path, GPT], Drafter] = getattr(import_module(module), function)
    return load(resolve(draft_dir), target)


def _read_json(path: Path, role: str = "draft_dir") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{str(path)!r} ({role}) cannot be read as JSON: {reason}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} ({role}) holds a {type(content).__name__}; it must hold an object.")
    return content


def _weight_files(folder: Path, role: str = "draft_dir") -> dict[str, Path]:
    """The file of each weight."""
    index = folder / INDEX
    if index.is_file():
        # The index avoids opening every file of a large checkpoint.
        places = _read_json(index, role).get("weight_map")
        if not isinstance(places, dict) or any(Path(str(file)).name != file for file in places.values()):
            raise InputError(
                f"{str(index)!r} ({role}) is not an index of safetensors files; its weight_map must name a file of "
                "this folder for each weight."
            )
        return {name: folder / file for name, file in places.items()}
    files: dict[str, Path] = {}
    for part in sorted(folder.glob("*.safetensors")):
        with _safetensors(part, role) as file:
            files |= dict.fromkeys(file.keys(), part)
    if not files and (folder / PICKLE).is_file():
        files = dict.fromkeys(_unpickled(folder / PICKLE, role), folder / PICKLE)
    return files


def _safetensors(path: Path, role: str) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise InputError(f"{str(path)!r} ({role}) is missing, but the folder's index names it.") from error
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as file:
            pointer = file.read(64).startswith(b"version https://git-lfs")
        what = "is a Git LFS pointer; fetch the weights with `git lfs pull`" if pointer else f"is damaged: {error}"
        raise InputError(f"{str(path)!r} ({role}) {what}.") from error


def _unpickled(path: Path, role: str) -> dict[str, Tensor]:
    try:
        # Only zip archives can be memory-mapped; files of PyTorch before 1.6 are not archives.
        content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{str(path)!r} ({role}) would run code when loaded, or is damaged, and is rejected; a drafter's file "
            "may hold only tensors."
        ) from error
    except Exception as error:  # a damaged pickle can raise almost any error
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{str(path)!r} ({role}) is damaged or not a file of weights: {reason}.") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(f"{str(path)!r} ({role}) must hold a dict of tensors by name.")
    return content
