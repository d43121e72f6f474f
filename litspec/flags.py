"""Flags from a function's signature. Strings arrive as typed; only values of other types are parsed.

jsonargparse parses every value with a type such as `str | None` as YAML, which reads "###" as a comment and "null" as
None. So each flag has its own converter here. jsonargparse does the help, the files of `--config` and the commands.
"""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from litspec.arguments import checked, in_words, shown
from litspec.errors import InputError

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = ("null", "none", "~")


class BadValue(argparse.ArgumentTypeError, ValueError):
    """A value that a flag cannot take. argparse expects the first base class, jsonargparse the second."""


class Value:
    """Converts a typed string to a flag's value, or checks a value from a file.

    Args:
        name: Name of the flag.
        hint: Its type.
    """

    def __init__(self, name: str, hint: Any) -> None:
        self.name = name
        self.hint = hint
        self.parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        self.repeats = list[str] in self.parts
        self.is_object = any(get_origin(part) is Mapping for part in self.parts)

    def __call__(self, given: Any) -> Any:
        """The value. A value that is converted already is only checked.

        Raises:
            BadValue: The flag does not take this value.
        """
        if not isinstance(given, str):
            try:
                return checked(self.name, given, self.hint, none="null")
            except InputError as error:
                quote = " (put it in quotes)" if str in self.parts or self.repeats else ""
                raise BadValue(f"{error}{quote}") from None
        if self.is_object and given.lstrip().startswith("{"):
            try:
                return self(json.loads(given))
            except ValueError as error:
                raise BadValue(f"{self.name} is not JSON: {error}.") from None
        if any(given in get_args(part) for part in self.parts if get_origin(part) is Literal):
            return given
        if type(None) in self.parts and str not in self.parts and not self.repeats and given.lower() in _NULLS:
            return None
        if bool in self.parts and given.lower() in _BOOLS:
            return _BOOLS[given.lower()]
        for kind in (int, float):
            if kind in self.parts:
                try:
                    return kind(given)
                except ValueError:
                    continue
        if str in self.parts or self.repeats:
            return given
        raise BadValue(f"{self.name} must be {in_words(self.hint, 'null')}, got {shown(given)}")


class HelpFormatter(DefaultHelpFormatter):
    """Shows a flag's type in words."""

    def _get_type_str(self, action: argparse.Action) -> str | None:
        return in_words(action.type.hint, "null") if isinstance(action.type, Value) else super()._get_type_str(action)


class Append(argparse.Action):
    """Adds a value to those of earlier flags or of a file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*([before] if isinstance(before, str) else before), values])


def add_flags(parser: ArgumentParser, function: Callable[..., Any]) -> None:
    """Gives a parser a flag for each parameter of a function, with the help that its docstring has."""
    helps = {param.arg_name: param.description for param in parse(inspect.getdoc(function) or "").params}
    for name, parameter in inspect.signature(function).parameters.items():
        value = Value(name, parameter.annotation)
        more: dict[str, Any] = {}
        if get_origin(value.hint) is Literal:
            more["metavar"] = "{" + ",".join(get_args(value.hint)) + "}"
        if value.repeats:
            more["action"] = Append
        if value.hint is bool:
            more |= {"nargs": "?", "const": True, "metavar": "{true,false}"}  # the flag alone means true
        if parameter.default is inspect.Parameter.empty:
            more["required"] = True
        else:
            more["default"] = parameter.default
        help_ = " ".join((helps.get(name) or "").split()).replace("%", "%%")
        parser.add_argument(f"--{name}", type=value, help=help_, **more)


def joined(argv: Sequence[str], function: Callable[..., Any]) -> list[str]:
    """Ties each value to its flag (`--stop=---`), since argparse takes one that begins with a dash for a flag."""
    parameters = inspect.signature(function).parameters
    flags = {f"--{name}" for name in parameters} | {"--config", "--help", "--print_config"}
    single = {f"--{name}" for name, parameter in parameters.items() if parameter.annotation is not bool}
    result: list[str] = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if arg in single and rest and rest[0].split("=")[0] not in flags:
            arg = f"{arg}={rest.pop(0)}"
        result.append(arg)
    return result
