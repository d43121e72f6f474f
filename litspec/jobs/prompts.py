"""What a job is asked for: a file of prompts."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litspec.arguments import checked, hints_of, shown
from litspec.config import FOR_TEXTS, GenerateConfig, names_file
from litspec.errors import InputError
from litspec.jobs.disk import digest, dump


@dataclass(frozen=True)
class Request:
    """One text that is wanted.

    Attributes:
        index: The prompt's number, from 0.
        sample: Which of the prompt's texts, from 0; None where there is one each.
        id: As given in the file, else `index`.
        prompt: The prompt.
        settings: What the line says about its own text, by the names of `SpecLLM.generate`.
        error: Why there can be no text, as a sentence; None where there is nothing against it.
    """

    index: int
    sample: int | None
    id: str | int
    prompt: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def head(self) -> dict[str, Any]:
        """How the lines about this text begin."""
        return {"id": self.id} if self.sample is None else {"id": self.id, "sample": self.sample}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# What a line may say beside id and prompt, by the names of `GenerateConfig`.
OVERRIDES = (
    "sys_prompt",
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    *FOR_TEXTS,
    "seed",
    "stop",
)


class Prompts:
    """The texts that a file of prompts asks for.

    A file whose name ends in .jsonl or .ndjson holds a JSON object a line: "prompt", and as one likes "id" (a string or
    a whole number) and any of `OVERRIDES`. One that ends in .txt holds a prompt a line, taken as it is. Empty lines are
    left out and not counted. What is wrong with a line is told by its request.

    The file is read once and held, so that what is written into it later changes nothing.

    Attributes:
        digest: A hash of the content.
        num_samples: How many texts each prompt gets; they stand one after the other.

    Raises:
        InputError: When the file cannot be read or holds no prompt.
    """

    def __init__(self, path: str | Path, num_samples: int = 1) -> None:
        if num_samples < 1:
            raise InputError(f"num_samples must be at least 1, got {num_samples}")
        kind = Path(path).suffix.lower()
        if kind not in (".jsonl", ".ndjson", ".txt"):
            raise InputError(
                "The name of prompts_file must end in .jsonl (a JSON object a line) or .txt (a prompt a line), got "
                f"{str(path)!r}"
            )
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                # Every rank reads it, and so does the next run: a pipe gives its content once and makes them wait.
                raise InputError(
                    f"prompts_file {str(path)!r} is no plain file; write the prompts into one, it is read more than "
                    "once."
                )
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"prompts_file {str(path)!r} cannot be read: {error.strerror or error}.") from error
        self.num_samples = num_samples
        self._plain = kind == ".txt"
        self.digest = digest("plain" if self._plain else "json", content)
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not self._lines:
            raise InputError(f"prompts_file {str(path)!r} holds no prompt; write one a line.")

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return len(self._lines)

    def __len__(self) -> int:
        return self.count * self.num_samples

    def repeated_ids(self) -> list[str | int]:
        """The ids that more than one prompt has, in the order in which they come."""
        if self._plain:
            return []
        counts = Counter(self[index * self.num_samples].id for index in range(self.count))
        return [id_ for id_, count in counts.items() if count > 1]

    def __getitem__(self, number: int) -> Request:
        index, sample = divmod(number, self.num_samples)
        line_number, line = self._lines[index]
        given: dict[str, Any] = {"id": index}
        try:
            found = self._parse(line, f"Line {line_number} of prompts_file", given)
            given |= {"prompt": found.pop("prompt"), "settings": found}
        except InputError as error:
            given["error"] = str(error)
        return Request(index, sample if self.num_samples > 1 else None, **given)

    def _parse(self, line: bytes, where: str, given: dict[str, Any]) -> dict[str, Any]:
        """The content of a line, of which the id goes to `given`, also where the rest is of no use."""
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{where} is not valid UTF-8 (byte {error.start + 1}).") from error
        if self._plain:
            return {"prompt": text.removesuffix("\r")}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise InputError(f'{where} must be an object such as {{"prompt": "..."}}, got {shown(found)}')
        try:
            dump(found).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where} is not valid Unicode: it holds half of a surrogate pair.") from error
        except RecursionError as error:  # what can be read need not be shallow enough to be written
            raise InputError(f"{where} is nested too deep; a line holds strings and numbers.") from error
        id_ = found.pop("id", None)
        if id_ is not None:
            if not (isinstance(id_, str) or _is_int(id_)):
                raise InputError(f"{where}: id must be a string or a whole number, got {shown(id_)}")
            given["id"] = id_
        if not isinstance(found.get("prompt"), str):
            what = f"got {shown(found['prompt'])}" if "prompt" in found else "but the line has none"
            raise InputError(f"{where}: prompt must be a string, {what}")
        hints = hints_of(GenerateConfig)
        for name, value in found.items():
            if name == "prompt":
                continue
            if name not in OVERRIDES:
                raise InputError(f"{where}: unknown key {name!r}; known are id, prompt, {', '.join(OVERRIDES)}")
            hint = int if name == "seed" else hints[name]  # a seed of null could not be resumed
            try:
                if isinstance(value, str) and names_file(name, value):
                    raise InputError(f"{name} cannot name a file here, got {shown(value)}; write its content")
                found[name] = checked(name, value, hint, none="null")
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        return found
