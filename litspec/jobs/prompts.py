"""The prompts of a job: reading and checking its prompts file."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litspec.arguments import checked, hints_of, meant, shown
from litspec.config import FOR_TEXTS, GenerateConfig, names_file
from litspec.errors import InputError
from litspec.jobs.disk import digest, dump


@dataclass(frozen=True)
class Request:
    """A request for one text.

    Attributes:
        index: Number of the prompt, from 0.
        sample: Number of the sample of this prompt, from 0; None if each prompt has one.
        id: The line's id, by default `index`.
        prompt: The prompt.
        settings: The line's own arguments of `SpecLLM.generate`.
        error: Why the line cannot be used, as a sentence; None if it can.
    """

    index: int
    sample: int | None
    id: str | int
    prompt: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def head(self) -> dict[str, Any]:
        """The first keys of the output lines of this text."""
        return {"id": self.id} if self.sample is None else {"id": self.id, "sample": self.sample}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Keys of a line other than id and prompt, by the names of `GenerateConfig`.
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
    """The requests of a prompts file.

    A .jsonl or .ndjson file holds one JSON object per line. Its keys are "prompt", optionally "id" (a string or a
    whole number), and any of `OVERRIDES`. A .txt file holds one prompt per line. Empty lines are skipped
    and not counted. An error in a line is reported in its `Request`.

    The file is read once, so later changes to it have no effect.

    Attributes:
        digest: Hash of the content.
        num_samples: Number of texts per prompt. They follow each other.

    Raises:
        InputError: The file cannot be read or holds no prompt.
    """

    def __init__(self, path: str | Path, num_samples: int = 1) -> None:
        if num_samples < 1:
            raise InputError(f"num_samples must be at least 1, got {num_samples}")
        kind = Path(path).suffix.lower()
        if kind not in (".jsonl", ".ndjson", ".txt"):
            raise InputError(
                "The name of prompts_file must end in .jsonl (one JSON object per line) or .txt (one prompt per "
                f"line), got {str(path)!r}"
            )
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                # Every rank reads the file, and so does the next run. A pipe can be read only once.
                raise InputError(
                    f"prompts_file {str(path)!r} is not a regular file; write the prompts to one, because they are "
                    "read more than once."
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
            raise InputError(f"prompts_file {str(path)!r} holds no prompt; write one per line.")

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return len(self._lines)

    def __len__(self) -> int:
        return self.count * self.num_samples

    def repeated_ids(self) -> list[str | int]:
        """The ids that more than one prompt has, in the order of the file."""
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
        """The content of a line. Its id goes to `given` first, so that it is known even if the rest is invalid."""
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
            raise InputError(f"{where} is not valid Unicode: it contains an unpaired surrogate.") from error
        except RecursionError as error:  # writing can recurse deeper than reading
            raise InputError(f"{where} is nested too deeply; a line contains strings and numbers.") from error
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
                known = ["id", "prompt", *OVERRIDES]
                close = meant(name, known) or f"; known keys are {', '.join(known)}"
                raise InputError(f"{where}: unknown key {name!r}{close}")
            hint = int if name == "seed" else hints[name]  # without a seed the job could not be resumed
            try:
                if isinstance(value, str) and names_file(name, value):
                    raise InputError(f"{name} cannot name a file here, got {shown(value)}; give its content")
                found[name] = checked(name, value, hint, none="null")
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        return found
