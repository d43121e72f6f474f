"""Checkpoint folders in LitGPT's format: opening them, reading weights, and checking that two are a pair.

Errors in a user's folder are found here and reported in one sentence (`InputError`), if possible before weights are
read. Weights are read with `weights_only=True`, so that a pickle cannot run code, and with `mmap=True`, so that a
tensor that needs no cast is never copied.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import traceback
import types
import typing
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from litgpt.config import Config, configs
from litgpt.tokenizer import Tokenizer
from litgpt.utils import extend_checkpoint_dir, fix_and_load_json
from torch import Tensor, nn

from litspec.convert import WEIGHTS, command_for, convert, is_hugging_face
from litspec.errors import InputError

_SIZES: tuple[str, ...] = ("block_size", "n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "vocab_size")
_SIZES += (
    "padded_vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "padding_multiple",
    "sliding_window_size",
    "rope_base",
)
_SIZES += ("rope_condense_ratio", "attention_scores_scalar")
_LARGEST = 1e12  # limit of numbers in a config, so that products of sizes do not overflow


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that has been checked.

    Attributes:
        dir: The folder, as LitGPT resolves it: as given, or in `./checkpoints`.
        config: The model that `model_config.yaml` describes.
        weights: Path of `lit_model.pth`.
        role: The argument that named the folder, for error messages.
    """

    dir: Path
    config: Config
    weights: Path
    role: str = "checkpoint_dir"


@dataclass(frozen=True)
class PairReport:
    """Comparison of the vocabularies of a target and a draft checkpoint.

    Attributes:
        shared_vocab_size: Draft ids must be below it and not in `excluded`. The target may produce all its ids.
        notes: Sentences for the user.
        excluded: Ids below `shared_vocab_size` that differ between the two, in rising order.
    """

    shared_vocab_size: int
    notes: tuple[str, ...] = ()
    excluded: tuple[int, ...] = ()


# --- Folders ----------------------------------------------------------------------------------------------------------


def open_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, role: str = "checkpoint_dir", may_convert: bool = False
) -> Checkpoint:
    """Opens and checks a checkpoint folder, except its tokenizer and the values of its weights.

    Args:
        checkpoint_dir: A path, or a name in `./checkpoints`, as in LitGPT's commands.
        role: The argument or flag that gave it, for error messages.
        may_convert: Convert a Hugging Face folder in place, if this is the only process.

    Raises:
        InputError: The folder or a file in it is missing, unreadable, or not in LitGPT's format.
    """
    given = os.fspath(checkpoint_dir)
    if not given or "\0" in given:
        raise InputError(f"{role} is {given!r}; give the path of a LitGPT checkpoint folder.")
    try:
        folder = extend_checkpoint_dir(Path(given))
        _check_folder(Path(given), folder, role)
        alone = os.environ.get("WORLD_SIZE", "1") == "1"  # several ranks would overwrite each other's files
        if may_convert and alone and not os.path.lexists(folder / WEIGHTS) and is_hugging_face(folder):
            convert(folder, role)
        _check_weights_file(folder, role)
        for names in (("model_config.yaml",), ("tokenizer.json", "tokenizer.model"), ("tokenizer_config.json",)):
            _check_present(folder, names, role)
    except OSError as error:
        where = str(error.filename or given)
        raise InputError(f"{where!r} ({role}) cannot be read: {error.strerror or error}.") from error
    return Checkpoint(folder, _read_config(folder / "model_config.yaml", role), folder / WEIGHTS, role)


def _check_folder(given: Path, folder: Path, role: str) -> None:
    if folder.is_dir():
        os.listdir(folder)
        os.stat(os.path.join(folder, "."))  # raises if the folder may be listed but not entered
        return
    if folder.exists():
        holder = f", here {str(folder.parent)!r}" if folder.name == WEIGHTS else ""
        raise InputError(f"{role} {str(folder)!r} is a file; give the folder that holds {WEIGHTS}{holder}.")
    as_given = given.is_absolute() or given.parts[0] == "checkpoints"
    where = "" if as_given else ", neither as given nor in ./checkpoints"
    what = f"{role} {str(given)!r} does not exist{where}"
    raise InputError(f"{what}; give a LitGPT checkpoint folder{_download(given)}.")


def _download(given: Path) -> str:
    """The end of a sentence about a missing folder: the command that downloads it."""
    parts = given.parts[-2:]
    for config in configs:
        hub = config["hf_config"]
        if hub["name"].lower() == parts[-1].lower() and (len(parts) < 2 or parts[0] in ("checkpoints", hub["org"])):
            return f", for example from `litgpt download {hub['org']}/{hub['name']}`"
    return ", for example from `litgpt download ORG/NAME` (`litgpt download list` shows the names)"


def _check_present(folder: Path, names: tuple[str, ...], role: str) -> None:
    for name in names:
        if (folder / name).is_file():
            open(folder / name, "rb").close()
            return
        _check_plain(folder / name, role)
    raise InputError(f"{role} {str(folder)!r} has no {' or '.join(names)}; a LitGPT checkpoint folder holds one.")


def _check_plain(path: Path, role: str) -> None:
    """Raises InputError for a broken link, a pipe or a device. Reading a pipe or a device might never end."""
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{str(path)!r} ({role}) is a link to {os.readlink(path)!r}, which does not exist; restore that file, or "
            "replace the link with the file."
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{str(path)!r} ({role}) is a pipe or a device; it must be a regular file.")


def _check_weights_file(folder: Path, role: str) -> None:
    """Checks the first and last bytes of `lit_model.pth`. If it is missing, reports what the folder holds instead."""
    path = folder / WEIGHTS
    if path.is_dir():
        raise InputError(
            f"{str(path)!r} ({role}) is a folder of shards from sharded training; convert it to one file with "
            f"`fabric consolidate {path}`."
        )
    _check_plain(path, role)
    if not path.is_file():
        raise InputError(f"{role} {str(folder)!r} has no {WEIGHTS}{_what_else(folder)}.")
    with open(path, "rb") as file:
        head = file.read(64)
    if zipfile.is_zipfile(path):
        return
    if not head:
        what = "is empty (0 bytes); download or convert the checkpoint again"
    elif head.startswith(b"version https://git-lfs"):
        what = "is a Git LFS pointer, not the weights it points to; fetch them with `git lfs pull`"
    elif head.startswith(b"PK"):
        what = f"is truncated ({path.stat().st_size:,} bytes); download or convert the checkpoint again"
    elif head[8:9] == b"{":
        what = f"is a safetensors file under another name; rename it to model.safetensors, then {command_for(folder)}"
    elif head.startswith(b"\x80"):
        what = "is in the format of PyTorch before 1.6 or a bare pickle; save the weights again with torch.save"
    else:
        what = "is not a PyTorch file; it must hold weights saved by LitGPT"
    raise InputError(f"{str(path)!r} ({role}) {what}.")


def _what_else(folder: Path) -> str:
    """The end of the sentence "The folder has no lit_model.pth": what it has instead and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    if f"{WEIGHTS}.lora" in names:
        return f" but LoRA weights, {WEIGHTS}.lora; merge them with `litgpt merge_lora {folder}`"
    if adapters := [name for name in names if name.startswith(f"{WEIGHTS}.adapter")]:
        return f" but adapter weights, {adapters[0]}, which cannot be merged; give a checkpoint with full weights"
    if any(name.endswith((".safetensors", ".bin")) or name.endswith(".index.json") for name in names):
        return f"; it is a Hugging Face folder not yet converted: {command_for(folder)}"
    if below := [name for name in names if (folder / name / WEIGHTS).exists()]:
        return f", but a subfolder has one: give {str(folder / below[-1])!r}"
    if others := [name for name in names if name.endswith((".pth", ".pt", ".ckpt"))]:
        return f" but {others[0]}; the weights of a LitGPT checkpoint folder are in {WEIGHTS}"
    return "; give a LitGPT checkpoint folder, for example from `litgpt download`"


def _read_config(path: Path, role: str) -> Config:
    """Reads `model_config.yaml` and checks the types of its values, which LitGPT's `Config` does not."""
    what = f"{str(path)!r} ({role})"
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{what} is not valid YAML: {error.problem}{line}.") from error
    except RecursionError as error:
        raise InputError(f"{what} is nested too deeply; it must hold the fields of LitGPT's Config.") from error
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputError(f"{what} cannot be read: {_one_line(error)}.") from error
    if not isinstance(fields, dict):
        held = "nothing" if fields is None else f"a {type(fields).__name__}"
        raise InputError(f"{what} holds {held}; it must hold the fields of LitGPT's Config.")
    hints = typing.get_type_hints(Config)
    if unknown := [name for name in fields if name not in hints]:
        raise InputError(f"{what} has the field {_one_line(repr(unknown[0]))}, which LitGPT's Config does not know.")
    for name, value in fields.items():
        if not _has_type(value, hints[name]):
            kind = str(getattr(hints[name], "__name__", hints[name])) if type(hints[name]) is type else str(hints[name])
            raise InputError(f"{what} has {name}: {_one_line(repr(value))}; it must be {kind.replace('typing.', '')}.")
        if name in _SIZES and value is not None and value < 1:
            raise InputError(f"{what} has {name}: {value}; it must be at least 1.")
        if isinstance(value, (int, float)) and not 0 <= value < _LARGEST:
            raise InputError(f"{what} has {name}: {value}; it must be a number from 0 to {_LARGEST:.0e}.")
    try:
        return Config(**fields)
    except AssertionError as error:
        # LitGPT's assertions have no message, so the asserted expression is shown.
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        must = line.removeprefix("assert ").replace("self.", "") or "its sizes to agree"
        raise InputError(f"{what} is inconsistent; LitGPT needs {must}.") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise InputError(f"{what} does not describe a model: {_one_line(error)}.") from error


def check_sizes(checkpoint: Checkpoint) -> None:
    """Checks that the sizes in the config fit the size of the weights file, before a model is built.

    Raises:
        InputError: A size is too large.
    """
    config, what = checkpoint.config, f"{str(checkpoint.dir / 'model_config.yaml')!r} ({checkpoint.role})"
    held = checkpoint.weights.stat().st_size
    head_size = 1 if config.latent_attention else config.head_size
    sizes = {
        "n_layer": config.n_layer,  # each layer has at least one byte
        "padded_vocab_size x n_embd": config.padded_vocab_size * config.n_embd,
        "n_layer x n_head x head_size": config.n_layer * config.n_head * head_size,
        "intermediate_size": config.intermediate_size,
        "n_expert x moe_intermediate_size": config.n_expert * (config.moe_intermediate_size or 1),
    }
    for name, size in sizes.items():
        if size > held:
            raise InputError(
                f"{what} has {name} = {size:,}, which cannot fit in the {held:,} bytes of {WEIGHTS}; give the config "
                "and the weights of the same model."
            )


def _has_type(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, args[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _one_line(error: BaseException | str, limit: int = 200) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- Weights ----------------------------------------------------------------------------------------------------------


def read_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights by LitGPT's names, memory-mapped: a tensor is read when it is used.

    Raises:
        InputError: The file is damaged, would run code, or does not hold a LitGPT model.
    """
    what = f"{str(checkpoint.weights)!r} ({checkpoint.role})"
    try:
        content = torch.load(checkpoint.weights, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{what} {_refused_pickle(str(error), checkpoint.dir)}.") from error
    except Exception as error:  # a damaged pickle can raise almost any error
        raise InputError(f"{what} is damaged or not a file of weights: {_one_line(error)}.") from error
    if isinstance(content, Mapping) and "param_groups" in content:
        raise InputError(f"{what} is the state of an optimizer; give the folder with the model's weights.")
    if isinstance(content, Mapping) and any(str(key).startswith("optimizer") for key in content):
        raise InputError(f"{what} is a training state with its optimizer; {_extract(checkpoint.dir)}.")
    weights = content.get("model", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not weights:
        held = "nothing" if isinstance(weights, Mapping) else f"a {type(weights).__name__}"
        raise InputError(f"{what} holds {held}; it must hold a state dict or {{'model': state dict}}.")
    _check_names(weights, what, checkpoint.dir)
    return _with_current_names(dict(weights), checkpoint.config)


def _extract(folder: Path) -> str:
    return f"extract the weights with `litgpt convert_pretrained_checkpoint {folder} OUTPUT_DIR`"


def _refused_pickle(message: str, folder: Path) -> str:
    """Explains why `weights_only` rejected the file: names the class or function that unpickling would have called."""
    found = re.search(r"GLOBAL ([\w.]+)", message) or re.search(
        r"(?:class|type|function) <?'?([\w.]+\.[\w.]+)", message
    )
    name = found.group(1) if found else None
    if name and name.startswith(("litgpt.", "lightning.")):
        return f"holds more than weights ({name}), as training saves them; {_extract(folder)}"
    if name:
        return f"would run code when loaded ({name}) and is rejected; a checkpoint may hold only tensors"
    return "is damaged, or would run code when loaded, and is rejected; download or convert the checkpoint again"


def _check_names(weights: Mapping[Any, Any], what: str, folder: Path) -> None:
    known = ("transformer.wte.", "transformer.h.", "transformer.ln_f.", "lm_head.")
    names = [str(name) for name in weights]
    if lora := [name for name in names if "lora_" in name]:
        raise InputError(f"{what} holds LoRA weights ({lora[0]!r}); merge them with `litgpt merge_lora {folder}`.")
    if foreign := [name for name in names if not name.startswith(known)]:
        if re.match(r"(model|gpt_neox|transformer|backbone|language_model)\.", foreign[0]):
            how = f"are Hugging Face's names, so the checkpoint is not converted yet: {command_for(folder)}"
        elif "_orig_mod." in foreign[0]:
            how = f"are those of a compiled model in training; {_extract(folder)}"
        else:
            how = "are not LitGPT's names, which begin with 'transformer.' or 'lm_head.'"
        raise InputError(f"{what} holds names such as {foreign[0]!r}, which {how}.")
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{what} holds {name!r} as {kind}; it must hold floating-point tensors.")
        if value.layout != torch.strided or value.is_meta:
            kind = "a meta tensor without data" if value.is_meta else str(value.layout)
            raise InputError(f"{what} holds {name!r} as {kind}; it must hold dense tensors.")


def _with_current_names(weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Reads LitGPT's old format, with q, k and v interleaved by group under `attn.attn`."""
    for name in [name for name in weights if re.search(r"\.attn\.attn\.(weight|bias)$", name)]:
        from litgpt.scripts.convert_hf_checkpoint import qkv_reassemble

        weights[name.replace(".attn.attn.", ".attn.qkv.")] = qkv_reassemble(weights.pop(name), config)
    return weights


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | Callable[[str], torch.device] | None = None,
    part: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Loads a checkpoint's weights into a model, in place, tensor by tensor.

    A tensor that needs no cast and no transfer stays memory-mapped and needs no extra memory. Of the other tensors, one
    at a time exists twice. Weights that share memory in the file (a tied head) share it in the model. Buffers that are
    not in checkpoints (rope) are kept, or computed if the model is on the meta device.

    Args:
        model: A GPT with LitGPT's parameter names, on any device, the meta device included.
        checkpoint: The checkpoint of the weights.
        dtype: Dtype to cast to; None for the dtypes of the model's parameters.
        device: Device of the weights, or a function from a weight's name to its device. None for the model's device, or
            the CPU for a model on the meta device.
        part: A function from a weight's name and tensor to the part to keep; None to keep all.

    Raises:
        InputError: The weights do not fit the model; the model is then unchanged.
    """
    weights = read_state_dict(checkpoint)
    wanted = model.state_dict(keep_vars=True)
    _check_fit(weights, wanted, checkpoint)
    placed: dict[tuple[Any, ...], Tensor] = {}
    fixed = device if device is None or isinstance(device, (str, torch.device)) else None
    with torch.no_grad():
        for name, old in wanted.items():
            new = weights.pop(name)
            where = device if device is None or isinstance(device, (str, torch.device)) else device(name)
            to = torch.device(where) if where is not None else old.device
            to = torch.device("cpu") if to.type == "meta" else to
            kind = old.dtype if dtype is None else dtype
            same: tuple[Any, ...]
            same = (new.untyped_storage().data_ptr(), new.storage_offset(), new.shape, new.stride(), to, kind)
            if part is not None:
                new, same = part(name, new), (name,)
            if same not in placed:
                placed[same] = new.to(to, kind)
            _replace(model, name, placed[same], old)
    _settle_tables(model, fixed)


def _check_fit(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    what = f"{str(checkpoint.weights)!r} ({checkpoint.role})"
    for name, old in wanted.items():
        if name not in weights:
            raise InputError(f"{what} lacks {name!r}, which model_config.yaml requires.")
        if weights[name].shape != old.shape:
            found, right = tuple(weights[name].shape), tuple(old.shape)
            raise InputError(
                f"{what} does not fit model_config.yaml: {name!r} has shape {found}, but the model needs {right}."
            )
    if unexpected := [name for name in weights if name not in wanted]:
        raise InputError(f"{what} holds {unexpected[0]!r}, which the model of model_config.yaml does not have.")


def _replace(model: nn.Module, name: str, new: Tensor, old: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(old, nn.Parameter):
        setattr(owner, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        setattr(owner, leaf, new)


def _settle_tables(model: nn.Module, device: torch.device | str | None) -> None:
    """Moves the buffers that are not in checkpoints to the weights' device, and computes those on the meta device."""
    to = next(model.parameters()).device if device is None else torch.device(device)
    held = model.state_dict()
    for name, buffer in list(model.named_buffers()):
        if name in held or (device is None and not buffer.is_meta):
            continue
        if not buffer.is_meta:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, buffer.to(to))
        elif name in ("cos", "sin"):
            rope_cache: Any = model.rope_cache
            model.cos, model.sin = rope_cache(device=to)
        else:
            kind = type(model).__name__
            raise RuntimeError(f"{kind} is on the meta device, and its buffer {name!r} cannot be computed.")


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def load_tokenizer(checkpoint_dir: Path, *, role: str = "checkpoint_dir") -> Tokenizer:
    """Loads LitGPT's tokenizer from a folder, without settings for training.

    Raises:
        InputError: A file of the tokenizer is missing or broken.
    """
    path = checkpoint_dir / "tokenizer_config.json"
    if path.exists():
        content = _read_json(path, role)[0]
        if not isinstance(content.get("tokenizer_class"), str):
            raise InputError(f"{str(path)!r} ({role}) has no tokenizer_class, which LitGPT needs.")
    read_generation_config(checkpoint_dir, role=role)  # LitGPT reads it too; this reports a broken file by name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about JSON that LitGPT repairs, which `TextCodec.notes` reports
            return _for_inference(Tokenizer(checkpoint_dir))
    except Exception as error:  # the tokenizers library raises plain Exception
        names = ("tokenizer.json", "tokenizer.model")
        name = next((name for name in names if (checkpoint_dir / name).is_file()), " or ".join(names))
        what = f"{str(checkpoint_dir / name)!r} ({role})"
        raise InputError(f"{what} cannot be loaded as a tokenizer: {_one_line(error)}.") from error


def _for_inference(tokenizer: Tokenizer) -> Tokenizer:
    """Disables settings for training in `tokenizer.json`: truncation, padding and random splits (dropout)."""
    if tokenizer.backend == "huggingface":
        tokenizer.processor.no_truncation()
        tokenizer.processor.no_padding()
        if getattr(tokenizer.processor.model, "dropout", None):  # of BPE's merges
            tokenizer.processor.model.dropout = None
    return tokenizer


def read_generation_config(checkpoint_dir: Path, *, role: str = "checkpoint_dir") -> tuple[dict[str, Any], bool]:
    """The content of `generation_config.json` (`{}` without it), and whether LitGPT's repair of broken JSON was needed.

    Raises:
        InputError: The file cannot be read or repaired.
    """
    path = checkpoint_dir / "generation_config.json"
    content, repaired = _read_json(path, role, repair=True) if path.is_file() else ({}, False)
    bos = content.get("bos_token_id")
    if bos is not None and (not isinstance(bos, int) or isinstance(bos, bool)):
        raise InputError(f"{str(path)!r} ({role}) has bos_token_id: {_one_line(repr(bos), 60)}; it must be an integer.")
    return content, repaired


def _read_json(path: Path, role: str, repair: bool = False) -> tuple[dict[str, Any], bool]:
    repaired = False
    try:
        text = path.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            if not repair:
                raise
            content, repaired = fix_and_load_json(text), True
    except OSError as error:
        raise InputError(f"{str(path)!r} ({role}) cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError, IndexError) as error:
        raise InputError(f"{str(path)!r} ({role}) is not valid JSON: {_one_line(error)}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} ({role}) holds a {type(content).__name__}; it must hold a JSON object.")
    return content, repaired


class _Vocabulary(NamedTuple):
    tokens: dict[int, str]  # by id
    added: dict[int, bool]  # for each added token: whether it is special


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    processor = tokenizer.processor
    if tokenizer.backend == "sentencepiece":
        tokens = {id_: processor.id_to_piece(id_) for id_ in range(processor.get_piece_size())}
        return _Vocabulary(
            tokens, {id_: True for id_ in tokens if processor.is_control(id_) or processor.is_unknown(id_)}
        )
    tokens = {id_: token for token, id_ in processor.get_vocab(with_added_tokens=True).items()}
    return _Vocabulary(tokens, {id_: token.special for id_, token in processor.get_added_tokens_decoder().items()})


def check_pair(target: Checkpoint, draft: Checkpoint) -> PairReport:
    """Checks that one checkpoint can draft for another. Their vocabularies must agree; padded sizes may differ.

    Every token of the smaller vocabulary must have the same id in the larger one. Ids where only added special tokens
    differ, and ids that one of the two lacks, are allowed but never proposed.

    Raises:
        InputError: A token differs; the message names the one with the lowest id.
    """
    tokenizers = [load_tokenizer(checkpoint.dir, role=checkpoint.role) for checkpoint in (target, draft)]
    of_target, of_draft = map(_vocabulary, tokenizers)
    common = of_target.tokens.keys() & of_draft.tokens.keys()
    # Ids that only the smaller one has are errors too: the larger one has their tokens at other ids, or not at all.
    smaller = min(of_draft.tokens, of_target.tokens, key=len)
    differing = [i for i in sorted(common | smaller.keys()) if of_target.tokens.get(i) != of_draft.tokens.get(i)]
    for id_ in differing:
        special = [of.added.get(id_) for of in (of_target, of_draft) if id_ in of.tokens]
        if None in special or True not in special:
            raise InputError(_mismatch(id_, target, draft, of_target.tokens, of_draft.tokens))
    size = min(max(of_target.tokens, default=-1), max(of_draft.tokens, default=-1)) + 1
    size = min(size, target.config.padded_vocab_size, draft.config.padded_vocab_size)
    one_sided = (of_target.tokens.keys() | of_draft.tokens.keys()) - common
    excluded = sorted(id_ for id_ in one_sided.union(differing) if id_ < size)

    notes = []
    if differing:
        first = differing[0]
        notes.append(
            f"{len(differing)} added special token(s) differ, first id {first}: {of_target.tokens.get(first)!r} in the "
            f"target, {of_draft.tokens.get(first)!r} in the draft; they are never proposed."
        )
    for owner, tokens in (("target", of_target.tokens), ("draft", of_draft.tokens)):
        if own := sorted(one_sided.intersection(tokens).difference(differing)):
            named = f"{own[0]} ({tokens[own[0]]!r})"
            notes.append(f"{len(own)} token(s) exist only in the {owner}, first id {named}; they are never proposed.")
    notes += _pair_notes(target, draft, *(tokenizer.use_bos for tokenizer in tokenizers))
    return PairReport(size, tuple(notes), tuple(excluded))


def _mismatch(id_: int, target: Checkpoint, draft: Checkpoint, targets: dict[int, str], drafts: dict[int, str]) -> str:
    """The error message for a token that has another id, or none, in the other tokenizer."""
    one, other, tokens, others = ("target", "draft", targets, drafts)
    if id_ not in tokens:
        one, other, tokens, others = ("draft", "target", drafts, targets)
    elsewhere = next((i for i, token in others.items() if token == tokens[id_]), None)
    place = "does not have it" if elsewhere is None else f"has it as id {elsewhere}"
    return (
        f"The tokenizers of {str(target.dir)!r} and {str(draft.dir)!r} ({draft.role}) differ: {tokens[id_]!r} is id "
        f"{id_} of the {one}, but the {other} {place}; give a draft model with the target's vocabulary."
    )


def _pair_notes(target: Checkpoint, draft: Checkpoint, target_bos: bool, draft_bos: bool) -> list[str]:
    notes = []
    if target_bos != draft_bos:
        does, does_not = (target, draft) if target_bos else (draft, target)
        notes.append(
            f"Warning: LitGPT puts BOS before prompts for the folder {does.dir.name!r} but not for "
            f"{does_not.dir.name!r} (from the folder's name and tokenizer_config.json); prompts are encoded as for the "
            "target."
        )
    ends, goes_on = draft.config.block_size, target.config.block_size
    if ends < goes_on:
        notes.append(
            f"The draft's block_size is {ends:,}, the target's {goes_on:,}; nothing is drafted after position {ends:,}."
        )
    return notes
