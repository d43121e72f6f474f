"""The texts that a draft learns from: prompts and the target's answers.

OUT/training/prompts.jsonl   the prompts, as `litspec generate --prompts_file` takes them
OUT/training/answers.jsonl   the target's answers: a job's out file, with its own files beside it
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.jobs.disk import as_line, dump, load_line, log, whole_lines, write_atomically
from litspec.text import TextCodec

CUT_TOKENS = 32
JSON_LINES = (".jsonl", ".ndjson")
MOST_BYTES = 1 << 28  # read from a file of plain text; more would only slow down the choice of prompts


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer.

    Attributes:
        ids: Prompt and answer, `(T,)` int64, as the target read and wrote them.
        start: Where the answer begins.
        asked: The prompt as it was given, and its own system prompt if it has one.
    """

    ids: Tensor
    start: int
    asked: dict[str, str]


# --- prompts ---


def read_prompts(
    data: str | Path, codec: TextCodec, *, limit: int, seed: int, prompt_tokens: int | None = None
) -> list[dict[str, Any]]:
    """The prompts of a file or of all files of a folder, at most `limit`, without repeated pairs of prompt and answer.

    Args:
        data: A .jsonl file with one object per line, as for jobs, optionally with an answer, "text". A .txt file with
            one prompt per line. Any other text file is split into prompts.
        codec: The target's.
        limit: If there are more, this many are chosen at random.
        seed: Seed of that choice.
        prompt_tokens: Split .txt files too, into prompts of this many tokens.

    Returns:
        Objects with at least "prompt".

    Raises:
        InputError: A file cannot be read, a line is not a prompt, or there are fewer than two prompts.
    """
    path = Path(data)
    if not path.exists():
        raise InputError(f"data {str(data)!r} does not exist; give a file of prompts or text, or a folder of them.")
    found: dict[tuple[str, str | None], dict[str, Any]] = {}
    for file in _files(path):
        for line in _lines(file, codec, prompt_tokens, alone=file == path):
            found.setdefault((line["prompt"], line.get("text")), line)
    prompts = list(found.values())
    if len(prompts) < 2:
        raise InputError(
            f"data {str(data)!r} holds {len(prompts)} prompts; at least 2 are needed, one to learn from and one to "
            "measure on."
        )
    if len(prompts) > limit:
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))[:limit]
        prompts = [prompts[i] for i in sorted(order.tolist())]
    return prompts


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(
        Path(folder, name)
        for folder, folders, names in os.walk(path)
        if not any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
        for name in names
        if not name.startswith(".")
    )
    return [file for file in found if file.is_file()]


def _lines(file: Path, codec: TextCodec, prompt_tokens: int | None, *, alone: bool) -> Iterator[dict[str, Any]]:
    """The prompts of one file. A file that is not text is skipped in a folder, and refused if it was named."""
    suffix = file.suffix.lower()
    try:
        if suffix in JSON_LINES:
            for number, raw in enumerate(whole_lines(file), 1):
                if not raw.strip():
                    continue
                line = load_line(raw)
                if not isinstance(line.get("prompt"), str):
                    raise InputError(f'Line {number} of {str(file)!r} is not a JSON object with a string "prompt".')
                yield line
            return
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES).decode("utf-8")
        if "\0" in content:
            raise ValueError("it contains NUL bytes")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError) or alone or isinstance(error, OSError):
            reason = error if isinstance(error, InputError) else f"{str(file)!r} (data) is not a text file: {error}."
            raise InputError(str(reason)) from error
        return
    if suffix == ".txt" and prompt_tokens is None:
        yield from ({"prompt": line} for line in content.splitlines() if line.strip())
        return
    yield from ({"prompt": piece} for piece in cut(content, codec, prompt_tokens or CUT_TOKENS))


def cut(text: str, codec: TextCodec, size: int) -> Iterator[str]:
    """Consecutive pieces of about `size` tokens. Characters that would be split are left out."""
    ids = codec.tokenizer.encode(text, bos=False, eos=False).tolist() if text else []
    for begin in range(0, len(ids) - size + 1, size):
        piece = codec.decode(ids[begin : begin + size]).strip("\ufffd")
        if piece.strip():
            yield piece


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is never trained on. Its own hash decides, so the answer is the same in every run and file."""
    number = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


# --- answers ---


def write_answers(
    prompts: Sequence[dict[str, Any]], folder: Path, *, load: dict[str, Any], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Lets the target answer the prompts, or resumes this. Prompts that come with an answer, "text", keep it.

    The coupled sampler is used, so that the answers do not depend on the drafter.

    Args:
        prompts: See `read_prompts`.
        folder: Folder for the files; created if it does not exist.
        load: Arguments of `SpecLLM.load`.
        settings: Arguments of `SpecLLM.generate`.

    Returns:
        For each prompt an object with "token_ids" or "text", or with neither if there is no answer. Those that the
        target wrote are marked by "own".

    Raises:
        InputError: See `run_job`; or the job was stopped by SIGTERM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [prompt for prompt in prompts if not isinstance(prompt.get("text"), str)]
    if not wanted:
        return list(prompts)
    file = write_lines(folder / "prompts.jsonl", wanted)
    out = folder / "answers.jsonl"
    code = run_job(file, out, load=load, **{**settings, "sampler": "coupled"})
    all_done()
    if code not in (0, 1):
        raise InputError(f"The target was stopped while writing answers to {str(out)!r}; the same command resumes it.")
    written = (load_line(raw) | {"own": True} for raw in whole_lines(out))
    return [prompt if isinstance(prompt.get("text"), str) else next(written) for prompt in prompts]


def all_done() -> None:
    """Waits for the other ranks of a job, if there are any: rank 0 writes the files of all."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Writes a file of JSON lines, unless it already contains them."""
    content = b"".join(as_line(dump(line)) for line in lines)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
    return path


def chosen_texts(
    prompts: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    codec: TextCodec,
    *,
    sys_prompt: str | None,
    longest: int,
    held_out: float,
) -> tuple[list[Text], list[Text]]:
    """The texts to train on and those held out, in the order of the prompts; at least one of each.

    Answers with an error, and texts without room for a draft, are left out. If the target has written some of the
    answers, only those are held out: other answers say nothing about its drafts.

    Args:
        prompts: See `read_prompts`.
        answers: See `write_answers`.
        codec: The target's.
        sys_prompt: As in `SpecLLM.generate`.
        longest: Tokens of the longest text that the draft and the target can read.
        held_out: Share of the texts that is held out.

    Raises:
        InputError: Fewer than two texts are left.
    """
    texts: list[Text] = []
    own: list[bool] = []
    for asked, line in zip(prompts, answers):
        answer = line.get("token_ids")
        if answer is None and isinstance(line.get("text"), str):
            answer = codec.tokenizer.encode(line["text"], bos=False, eos=False).tolist()
        if not isinstance(answer, list):
            continue
        begin = codec.encode(asked["prompt"], asked.get("sys_prompt", sys_prompt)).long().cpu()
        ids = torch.cat((begin, torch.tensor(answer, dtype=torch.int64)))[:longest]
        if ids.numel() - begin.numel() >= 2:
            texts.append(Text(ids, begin.numel(), {n: asked[n] for n in ("prompt", "sys_prompt") if n in asked}))
            own.append("own" in line)
    if (failed := len(prompts) - len(texts)) and texts:
        log(f"{failed} of {len(prompts)} prompts have no answer of two tokens or more and are left out.")
    if len(texts) < 2:
        raise InputError(f"Only {len(texts)} of the answers have two tokens or more; at least 2 texts are needed.")
    may = own if any(own) else [True] * len(texts)
    out = [m and is_held_out(text.asked["prompt"], held_out) for text, m in zip(texts, may)]
    if not any(out):
        out[max(i for i, m in enumerate(may) if m)] = True
    elif all(out):
        out[0] = False
    return [t for t, o in zip(texts, out) if not o], [t for t, o in zip(texts, out) if o]
