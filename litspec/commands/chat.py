"""`litspec chat`"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from litspec.arguments import spelled_out
from litspec.commands.generate import announce_compiling, log
from litspec.commands.lines import loading
from litspec.config import FLAG_DEFAULTS, GenerateConfig, LoadConfig, check_k

HELP = """\
/reset      begin a new conversation
/save FILE  write the conversation to a new file, as JSON messages
/help       show this
/quit       end the chat, as does Ctrl-D
Ctrl-C ends an answer and keeps its text so far. For a prompt that begins with a slash, type two slashes."""
COMMANDS = ("/reset", "/save", "/help", "/quit")
# Initial size of the K/V cache in tokens. It doubles as the conversation grows, up to the model's context.
FIRST_ROOM = 2048


@spelled_out(
    flags=True,
    without=("logprobs", "logprobs_mode"),
    defaults=FLAG_DEFAULTS | {"max_new_tokens": 256},
    load=LoadConfig,
    settings=GenerateConfig,
)
def chat(
    load: LoadConfig,
    *,
    settings: GenerateConfig,
    multiline: bool = False,
    raw: bool = False,
    show_acceptance: bool = False,
) -> int:
    """Chat with a model. The answers are those of the target alone, in less time.

    The conversation is formatted with the checkpoint's prompt style or its chat template. Earlier turns that the target
    has read are reused, in whole chunks of 512 tokens. Prompts are read from stdin, one per line. Answers go to stdout,
    everything else to stderr. Type /help in the chat to list its commands.

    Args:
        {load}
        {settings}
        multiline: Prompts have several lines; a line !submit ends a prompt.
        raw: Write control characters to a terminal unchanged; else they are escaped.
        show_acceptance: Colour the text by the origin of each token: drafted and accepted, or the target's own. Only in
            a terminal, and not if NO_COLOR is set.
    """
    from litspec.errors import InputError, printable

    if load.drafter != "none":
        check_k(settings.speculative_k, load.verify_width)
    if sys.stdin is None:
        raise InputError("stdin is closed; chat reads prompts from stdin.")
    from litspec.llm import SpecLLM
    from litspec.report import TerminalTint

    with loading(load.checkpoint_dir):
        llm = SpecLLM.load(**vars(load))
    if llm.placed.world_size > 1:
        raise InputError(
            f"chat runs in one process, but this placement has {llm.placed.world_size}; use --placement single or "
            "sequential, or `litspec generate`."
        )
    log(llm.describe())
    log(llm.codec.turns.describe())
    if load.compile:
        announce_compiling(llm.runner)
    tint = TerminalTint(sys.stdout) if show_acceptance else None
    if tint is not None and tint.enabled:
        tint.write_legend(sys.stderr)
    log("Type /help for help, /quit or Ctrl-D to end.")
    clean = printable if sys.stdout.isatty() and not raw else str
    return _Chat(llm, settings, tint, clean, multiline).run()


class _Chat:
    """Runs conversations until stdin ends."""

    def __init__(
        self, llm: Any, settings: GenerateConfig, tint: Any, clean: Callable[[str], str], multiline: bool
    ) -> None:
        self._llm = llm
        self._settings = settings
        self._tint = tint
        self._clean = clean
        self._multiline = multiline
        self._messages: list[dict[str, str]] = []
        self._room = 0
        self._answers = 0
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Runs until stdin ends. Returns 0, or 1 if stdin is not a terminal and a prompt or command failed."""
        from litspec.errors import InputError

        failed = False
        for prompt in self._prompts():
            try:
                if prompt.startswith("/") and not prompt.startswith("//"):
                    name, _, rest = prompt.partition(" ")
                    if name == "/quit":
                        break
                    self._command(name, rest.strip())
                else:
                    self._answer(prompt.removeprefix("/"))
            except InputError as error:
                log(str(error))
                failed = True
        return int(failed and not self._is_terminal)

    def _prompts(self) -> Iterator[str]:
        while True:
            try:
                prompt = self._read()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                log("\nType /quit or Ctrl-D to end the chat.")
                continue
            if prompt is None:
                if self._is_terminal:
                    print(flush=True)
                return
            if prompt.strip():
                yield prompt.strip()

    def _read(self) -> str | None:
        """Reads a prompt; None at the end of stdin."""
        lines: list[str] = []
        while (line := self._line("... " if lines else ">>> ")) is not None:
            is_command = not lines and line.startswith("/") and not line.startswith("//")
            if not self._multiline or is_command:
                return line
            if line.strip().lower() == "!submit":
                return "\n".join(lines)
            lines.append(line)
        return "\n".join(lines) if lines else None

    def _line(self, sign: str) -> str | None:
        from litspec.errors import InputError

        try:
            if self._is_terminal:
                with suppress(ImportError):
                    importlib.import_module("readline")  # importing it gives `input` line editing and history
                return input(sign)
            line = sys.stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not valid {sys.stdin.encoding}: {error.reason}.") from error
        return line.rstrip("\r\n") if line else None

    def _command(self, name: str, rest: str) -> None:
        from litspec.errors import InputError

        if name == "/help":
            log(HELP)
        elif name == "/reset":
            self._messages = []
            log("A new conversation begins.")
        elif name == "/save":
            if not rest:
                raise InputError("/save needs a file's name, such as /save talk.json")
            save(Path(rest).expanduser(), self._messages)
            log(f"Saved {len(self._messages)} messages to {rest}.")
        else:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f"did you mean {close[0]}?" if close else "type /help to list the commands."
            raise InputError(
                f"{name} is not a command; {meant} For a prompt that begins with a slash, type two slashes."
            )

    def _answer(self, prompt: str) -> None:
        messages = [*self._messages, {"role": "user", "content": prompt}]
        settings = self._fitting(messages)
        stream = self._llm.chat(messages, stream=True, index=self._answers, **vars(settings))
        self._answers += 1
        pieces: list[str] = []
        with _interrupts() as interrupted:
            try:
                for piece in stream:
                    pieces.append(piece)
                    if self._tint is not None:
                        self._tint.write([each._replace(text=self._clean(each.text)) for each in stream.latest])
                    else:
                        sys.stdout.write(self._clean(piece))
                        sys.stdout.flush()
                    if interrupted.is_set():
                        stream.close()
                        break
            finally:
                sys.stdout.write("\n")
                sys.stdout.flush()
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        if stream.completion is None:
            log("Interrupted.")
            return
        log(stream.completion.stats.summary())
        if stream.completion.finish_reason == "length":
            log(f"The answer ended at max_new_tokens = {settings.max_new_tokens}.")

    def _fitting(self, messages: list[dict[str, str]]) -> GenerateConfig:
        """The settings, with max_new_tokens limited by the model's context."""
        from litspec.errors import InputError

        settings, block_size = self._settings, self._llm.placed.model.config.block_size
        size = len(self._llm.codec.encode_messages(messages, settings.sys_prompt))
        left = block_size - size
        if left < max(1, settings.min_new_tokens):
            raise InputError(
                f"The conversation with this prompt has {size} tokens, and the model's block_size is {block_size}, so "
                "no room is left for an answer. Type a shorter prompt, or /reset for a new conversation."
            )
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, left))
        # A new cache is empty, so the size at least doubles each time.
        if self._room < (needed := size + settings.max_new_tokens):
            self._room = min(block_size, max(FIRST_ROOM, 1 << (needed - 1).bit_length()))
            self._llm.reserve(self._room)
        return settings


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Records a Ctrl-C, so that a round is never interrupted; a second one raises KeyboardInterrupt."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted  # only the main thread can handle signals
        return

    def note(number: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def save(path: Path, messages: list[dict[str, str]]) -> None:
    """Writes a conversation as JSON, atomically and never over an existing file.

    Raises:
        InputError: The file exists or cannot be written.
    """
    from litspec.errors import InputError

    text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
    try:
        with NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.") as file:
            file.write(text.encode("utf-8", errors="surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)  # unlike a rename, it fails if the file exists
    except FileExistsError:
        raise InputError(f"{str(path)!r} already exists; give another name.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be written: {reason}.") from error
