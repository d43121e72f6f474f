"""The `litspec` command."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

from litspec import __version__
from litspec.arguments import meant
from litspec.commands.bench import bench
from litspec.commands.chat import chat
from litspec.commands.distill import distill
from litspec.commands.extract_mtp import extract_mtp
from litspec.commands.generate import generate
from litspec.commands.verify import verify
from litspec.errors import InputError
from litspec.flags import HelpFormatter, add_flags, joined
from litspec.lifeline import check_environment

COMMANDS: dict[str, Callable[..., int]] = {
    "generate": generate,
    "chat": chat,
    "verify": verify,
    "bench": bench,
    "distill": distill,
    "extract_mtp": extract_mtp,
}


class Parser(ArgumentParser):
    """Says what is wrong with the flags in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # What `flags.Value` says is a whole sentence and names the flag.
        message = re.sub(
            r'^.*?(?:argument --|Parser key "(?:\w+\.)*)(\w+)"?:\s*(?=\1 must be )', "", message, flags=re.S
        )
        message = " ".join(message.split())
        given: re.Match[str] | None
        if given := re.fullmatch(r"Unrecognized arguments: (.+)", message):
            message = self._unknown(given[1].split())
        elif given := re.match(r"argument COMMAND: invalid choice: '(.+?)'", message):
            message = f"{given[1]} is not a command{meant(given[1], COMMANDS)}"
        elif given := re.search(r'Key "(?:(\w+)\.)?(\w+)" is required', message):
            message = f"{given[1] or 'The command'} needs --{given[2]}"
        elif given := re.search(r"Subcommand '(\w+)' does not accept nested key '(\w+)'", message):
            known = inspect.signature(COMMANDS[given[1]]).parameters
            message = f"The config file has the unknown key {given[2]!r}{meant(given[2], known)}"
        elif given := re.search(r'Parser key "config": File does not exist: (.+)', message):
            message = f"config {given[1]} does not exist"
        # jsonargparse reports some errors of a command by the parser of all commands.
        prog = self.prog.replace(" [options]", "")
        if prog == "litspec" and given and given[1] in COMMANDS:
            prog += f" {given[1]}"
        print(f"litspec: {message}{'' if message.endswith(('.', '?')) else '.'} See `{prog} --help`.", file=sys.stderr)
        sys.exit(2)

    def _unknown(self, words: list[str]) -> str:
        """Says which flags are unknown, and those that are spelled much like them."""
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        flags = [word.split("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return f"unexpected words {' '.join(words)}; a value follows its flag, in quotes if it has spaces"
        return "; ".join(f"there is no flag {flag}{meant(flag, known)}" for flag in flags)


def build_parser() -> ArgumentParser:
    """A parser with one subcommand for each function of `COMMANDS`; its signature is the flags."""
    set_parsing_settings(config_read_mode_urls_enabled=True)
    parser = Parser(
        prog="litspec",
        description="Speculative decoding for LitGPT checkpoints that changes the speed, never the text.",
        version=__version__,
    )
    subcommands = parser.add_subcommands(dest="command", title="commands", metavar="COMMAND")
    for name, function in COMMANDS.items():
        doc = function.__doc__ or ""
        summary, description = doc.split("\n\n")[0].strip(), doc.split("Args:")[0].strip()
        command = Parser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
        command.add_argument("--config", action="config", help="YAML file with values for the flags below.")
        add_flags(command, function)
        subcommands.add_subcommand(name, command, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0, 2 for input that cannot be used or a lost rank, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # A file or pipe on Windows, or a bare locale, may lack a character of the text: better another one than no text.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    if argv and argv[0] in COMMANDS:
        argv = joined(argv, COMMANDS[argv[0]])
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed; give the text a place to go, such as a file or /dev/null.")
        check_environment()
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
        if isinstance(error, OSError) and _stdout_failed():
            error = InputError(f"stdout cannot be written: {error.strerror}.")
        if not isinstance(error, InputError):
            from litspec.placement import LostRank  # takes long to import, and fails where lightning does

            if not isinstance(error, LostRank):
                raise
        print(f"litspec: {error}", file=sys.stderr)
        code = 2
    heartbeat = sys.modules.get("litspec.placement.heartbeat")
    if heartbeat is not None and heartbeat.LostRank.seen:
        # Threads of the engine that still wait for the lost rank would abort the interpreter on its way out.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _stdout_failed() -> bool:
    """Whether what stdout holds cannot be written; it is dropped then, lest the interpreter tries again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    main()
