"""The `litspec` command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, set_parsing_settings

from litspec import __version__
from litspec.commands.bench import bench
from litspec.commands.extract_mtp import extract_mtp
from litspec.commands.generate import generate
from litspec.commands.verify import verify

COMMANDS: dict[str, Callable[..., int]] = {
    "generate": generate,
    "verify": verify,
    "bench": bench,
    "extract_mtp": extract_mtp,
}


class Parser(ArgumentParser):
    """Says what is wrong with the flags in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        key = re.search(r'Parser key "(\w+)"', message)
        # jsonargparse stumbles over a value that is none of the names to choose from.
        if key and "Union of no types" in message:
            message = self._choices(key[1], message)
        print(f"litspec: {' '.join(message.split())} See `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)

    def _choices(self, key: str, message: str) -> str:
        hint = get_type_hints(COMMANDS[self.prog.split()[-1]])[key]
        named = {int: "a whole number", type(None): "null"}
        parts = [hint] if get_origin(hint) is Literal else get_args(hint)
        choices = [name for part in parts for name in (get_args(part) or [named.get(part, part.__name__)])]
        value = re.search("Given value: (.*)", message)
        # The value may stand behind a "=" or a blank; in a configuration file it is not looked for.
        given = re.search(f"(?:^|\n)--{key}[=\n]([^\n]*)", "\n".join(sys.argv))
        got = repr((value or given)[1]) if value or given else "another value"
        return f"{key} must be one of {', '.join(map(str, choices))}, got {got}."


def build_parser() -> ArgumentParser:
    """A parser with one subcommand for each function of `COMMANDS`; its signature is the flags."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True, config_read_mode_urls_enabled=True)
    parser = Parser(
        prog="litspec",
        description="Speculative decoding for LitGPT checkpoints that changes the speed, never the text.",
        version=__version__,
    )
    subcommands = parser.add_subcommands(dest="command", title="commands", metavar="COMMAND")
    for name, function in COMMANDS.items():
        summary = function.__doc__.split("\n\n")[0].strip()
        command = Parser(description=function.__doc__.split("Args:")[0].strip())
        command.add_argument("--config", action="config", help="YAML file with values for the flags below.")
        command.add_function_arguments(function)
        for action in command._actions:
            if isinstance(action.default, bool):
                action.nargs, action.const = "?", True  # the flag alone means true
        subcommands.add_subcommand(name, command, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0, 2 for input that cannot be used, 1 for a lost rank, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # jsonargparse writes "append to a list" with a plus.
    argv = ["--stop+" + arg[6:] if arg.split("=")[0] == "--stop" else arg for arg in argv]
    try:
        parsed = build_parser().parse_args(argv)
        values = vars(parsed[parsed.command])
        values.pop("config", None)
        code = COMMANDS[parsed.command](**values)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Who reads has seen enough. What is still buffered must not be written once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        from litspec.errors import InputError
        from litspec.placement import LostRank

        if not isinstance(error, (InputError, LostRank)):
            raise
        print(f"litspec: {error}", file=sys.stderr)
        code = 2 if isinstance(error, InputError) else 1
    sys.exit(code)


if __name__ == "__main__":
    main()
