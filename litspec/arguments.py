"""Argument lists that are written once: checks of values by type hints, and functions that take a config's fields.

It imports nothing slow, since `--help` uses it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from litspec.errors import InputError

R = TypeVar("R")

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
    Any: "an object",
    list[str]: "a list of strings",
    Sequence[str]: "a list of strings",
    Sequence[int]: "a list of whole numbers",
    Sequence[str | Sequence[int]]: "a list of strings or of lists of token ids",
    Mapping[int | str, float]: "an object of tokens and numbers",
    Mapping[str, Any]: "an object",
}
_LINE_WIDTH = 120
# Arguments of vLLM, transformers, llama.cpp and others, and their names here.
_OTHER_NAMES = {
    "assistant_model": "draft_dir",
    "device": "accelerator",
    "do_sample": "temperature",
    "draft_model": "draft_dir",
    "dtype": "precision",
    "greedy": "temperature",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "k": "speculative_k",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "model": "checkpoint_dir",
    "n": "num_samples",
    "num_assistant_tokens": "speculative_k",
    "num_return_sequences": "num_samples",
    "num_speculative_tokens": "speculative_k",
    "quantization": "quantize",
    "speculative_model": "draft_dir",
    "stop_strings": "stop",
    "system_prompt": "sys_prompt",
    "tensor_parallel_size": "devices",
    "torch_dtype": "precision",
}


def meant(given: str, known: Collection[str]) -> str:
    """Asks whether a known name was meant that other libraries call so, or that is spelled similarly; "" if none.

    Args:
        given: The unknown name, perhaps with the dashes of a flag.
        known: The known names, with dashes if `given` has them.
    """
    name = given.lstrip("-")
    dashes = given[: len(given) - len(name)]
    other = dashes + _OTHER_NAMES.get(name.replace("-", "_"), "")
    close = [other] if other in known else difflib.get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def checked(name: str, value: Any, hint: Any, *, none: str = "None") -> Any:
    """Checks the type of a value. Numbers are returned as Python's int or float.

    Args:
        name: Name of the setting, for the error.
        value: The value. A bool is not accepted as a number, nor a float such as 5.0 as a whole number.
        hint: Its type hint.
        none: How None is written in the source of the value, such as "null".

    Raises:
        InputError: It has another type.
    """
    if not _fits(value, hint):
        raise InputError(f"{name} must be {in_words(hint, none)}, got {shown(value)}")
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral) and int in (hint, *get_args(hint)):
        return int(value)
    if isinstance(value, Real) and float in (hint, *get_args(hint)):
        try:
            return float(value)
        except OverflowError:
            raise InputError(f"{name} must be a number that a float holds, got {shown(value)}") from None
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if isinstance(origin, type) and issubclass(origin, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        return is_list and all(_fits(item, args[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        is_mapping = isinstance(value, Mapping)
        return is_mapping and all(_fits(key, args[0]) and _fits(item, args[1]) for key, item in value.items())
    if hint is Any:
        return True
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def in_words(hint: Any, none: str = "None") -> str:
    """What a type hint allows, such as "a whole number or None"."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = []
    for part in parts:
        if get_origin(part) is Literal:
            words += [repr(choice) for choice in get_args(part)]
        else:
            words.append(none if part is type(None) else _WORDS.get(part, str(part)))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shown(value: Any) -> str:
    """A value as text for an error, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def hints_of(config: type, *, flags: bool = False) -> dict[str, Any]:
    """The types of a config's fields; with `flags` those that a flag or a line of a file can give."""
    hints = typing.get_type_hints(config, localns={"Drafter": Any})
    found = {field.name: hints[field.name] for field in fields(config)}
    if flags:
        found |= {field.name: field.metadata["flag"] for field in fields(config) if "flag" in field.metadata}
    return found


def spelled_out(
    *,
    flags: bool = False,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    **configs: type,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Turns a function that takes configs into one that takes their fields.

    The fields replace the config in the signature, and the line `{name of the config}` in the docstring. The configs
    are built, and so the values checked, before the function runs.

    Args:
        flags: Whether the signature is for flags: types as `hints_of` gives them, and None called null.
        without: Fields that the function does not offer; they keep the config's defaults.
        defaults: Those that differ from the config's.
        configs: The config's class for each parameter that is to be replaced.
    """
    own = defaults or {}
    offered = {
        parameter: [field for field in fields(config) if field.name not in without]
        for parameter, config in configs.items()
    }

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        own_hints = typing.get_type_hints(function) if flags else {}
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            if name not in configs:
                annotation = own_hints.get(name, parameter.annotation)
                parameters.append(parameter.replace(annotation=annotation))
                continue
            hints = hints_of(configs[name], flags=True) if flags else {}
            for field in offered[name]:
                kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
                default = own.get(field.name, field.default)
                annotation = hints.get(field.name, field.type)
                parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))
        parameters.sort(key=lambda parameter: parameter.kind)
        returns = own_hints.get("return", signature.return_annotation)
        flat = inspect.Signature(parameters, return_annotation=returns)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            for name in kwargs:
                if name not in flat.parameters:
                    close = meant(name, flat.parameters)
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{close}")
            given = flat.bind(*args, **kwargs).arguments
            for name, config in configs.items():
                values = {field.name: own[field.name] for field in offered[name] if field.name in own}
                values |= {field.name: given.pop(field.name) for field in offered[name] if field.name in given}
                given[name] = config(**values)
            return function(**given)

        call.__signature__ = flat  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
        call.__annotations__["return"] = returns
        call.__doc__ = function.__doc__ and _with_help(function.__doc__, offered, flags)
        return call

    return decorate


def _with_help(doc: str, offered: Mapping[str, Sequence[Field[Any]]], flags: bool) -> str:
    for name, shown_fields in offered.items():
        place = re.search(rf"^( *)\{{{name}\}}$", doc, re.MULTILINE)
        if place is None:
            continue
        lines = []
        for field in shown_fields:
            text = field.metadata["help"]
            text = text.replace("None", "null").replace("`", "") if flags else text
            indent = place[1]
            lines.append(
                textwrap.fill(
                    f"{field.name}: {text}",
                    _LINE_WIDTH,
                    initial_indent=indent,
                    subsequent_indent=indent + 4 * " ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        doc = doc.replace(place[0], "\n".join(lines))
    return doc
