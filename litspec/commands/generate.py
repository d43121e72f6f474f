"""`litspec generate`"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

from litspec.arguments import spelled_out
from litspec.commands.lines import loading
from litspec.config import FLAG_DEFAULTS, GenerateConfig, LoadConfig, check_batch_size, check_k

DEFAULT_PROMPT = "What food do llamas eat?"


@spelled_out(flags=True, defaults=FLAG_DEFAULTS, load=LoadConfig, settings=GenerateConfig)
def generate(
    load: LoadConfig,
    prompt: str = DEFAULT_PROMPT,
    *,
    prompts_file: str | None = None,
    out_file: str | None = None,
    num_samples: int = 1,
    batch_size: int | Literal["auto"] = "auto",
    settings: GenerateConfig,
    raw: bool = False,
    include_prompt: bool = False,
    output_format: Literal["text", "json"] = "text",
    show_acceptance: bool = False,
) -> int:
    """Generate text with speculative decoding: the text of the target alone, in less time.

    The text is streamed to stdout. Everything else goes to stderr.

    Args:
        {load}
        prompt: Text to continue or answer. The checkpoint's prompt style is applied to it.
        prompts_file: File of prompts. A .txt file holds one prompt per line. A .jsonl file holds one object per line,
            with "prompt", optionally "id", and optionally settings for this prompt alone: sys_prompt, max_new_tokens,
            min_new_tokens, temperature, top_k, top_p, min_p, logit_bias, bad_words, repetition_penalty,
            presence_penalty, frequency_penalty, json_schema, regex, grammar, response_format, logprobs, logprobs_mode,
            seed or stop. The exit code is 1 if a prompt got an error instead of a text, and 143 after SIGTERM.
        out_file: File for the texts of prompts_file, one JSON object per line in the order of the prompts. Statistics
            go to OUT_FILE.stats.jsonl. The same command resumes an interrupted job.
        num_samples: Number of texts per prompt.
        batch_size: The most texts of prompts_file that are generated at the same time. auto uses as many as
            fit in memory and increase throughput. A text does not depend on it.
        {settings}
        raw: Write control characters to a terminal unchanged; else they are escaped.
        include_prompt: Print the prompt before the text.
        output_format: text streams the text; json prints one object for each text.
        show_acceptance: Colour the text by the origin of each token: drafted and accepted, or the target's own. Only in
            a terminal, and not if NO_COLOR is set.
    """
    from litspec.errors import InputError, printable

    if num_samples < 1:
        raise InputError(f"num_samples must be at least 1, got {num_samples}")
    if load.drafter != "none":
        check_k(settings.speculative_k, load.verify_width)
    batch_size = check_batch_size(batch_size)
    if prompts_file is not None or out_file is not None:
        if prompts_file is None or out_file is None:
            missing = "prompts_file" if prompts_file is None else "out_file"
            raise InputError(f"prompts_file and out_file go together, but {missing} is not given.")
        for name, given, default in (
            ("prompt", prompt, DEFAULT_PROMPT),
            ("include_prompt", include_prompt, False),
            ("output_format", output_format, "text"),
            ("show_acceptance", show_acceptance, False),
        ):
            if given != default:
                raise InputError(
                    f"{name} = {given!r} cannot be used with prompts_file, whose texts go to out_file; leave it out."
                )
        from litspec.jobs import run_job

        return run_job(
            prompts_file,
            out_file,
            load=vars(load),
            num_samples=num_samples,
            batch_size=batch_size,
            **vars(settings),
        )
    from litspec.llm import SpecLLM
    from litspec.report import TerminalTint

    with loading(load.checkpoint_dir):
        llm = SpecLLM.load(**vars(load))
    if not llm.placed.is_rank_zero:
        # Other ranks compute too, but only rank 0 prints.
        for index in range(num_samples):
            llm.generate(prompt, index=index, **vars(settings))
        return 0
    log(llm.describe())
    if load.compile:
        announce_compiling(llm.runner)
    clean = printable if sys.stdout.isatty() and not raw else str
    tint = TerminalTint(sys.stdout) if show_acceptance and output_format == "text" else None
    if tint is not None and tint.enabled:
        tint.write_legend(sys.stderr)
    for index in range(num_samples):
        _sample(llm, prompt, include_prompt, output_format, tint, clean, index=index, **vars(settings))
    return 0


def log(text: str) -> None:
    """Prints a message for the user to stderr."""
    from litspec.errors import printable

    print(printable(text), file=sys.stderr, flush=True)


def json_line(stream: TextIO, value: Any) -> str:
    """JSON on one line; non-ASCII characters are escaped if the stream's encoding lacks one of them."""
    from litspec.jobs.disk import as_line, dump

    line = as_line(dump(value)).decode()
    try:
        line.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value) + "\n"
    return line


def announce_compiling(runner: Any) -> None:
    """Prints a line when the first step is compiled, since compiling takes a while."""

    def say() -> None:
        runner.notify = lambda: None
        log("Compiling; this takes a while ...")

    runner.notify = say


def _sample(
    llm: Any,
    prompt: str,
    include_prompt: bool,
    output_format: str,
    tint: Any,
    clean: Callable[[str], str],
    **settings: Any,
) -> None:
    """Prints one text and its statistics. `clean` is applied to the printed text."""
    compiled = llm.compile_seconds
    stream = llm.generate(prompt, stream=True, **settings)
    as_text = output_format == "text"
    if as_text and include_prompt:
        sys.stdout.write(clean(prompt))
    try:
        for piece in stream:
            if tint is not None:
                tint.write([piece._replace(text=clean(piece.text)) for piece in stream.latest])
            elif as_text:
                sys.stdout.write(clean(piece))
                sys.stdout.flush()
    finally:
        if as_text:
            sys.stdout.write("\n")
    completion = stream.completion
    if not as_text:
        text = prompt + completion.text if include_prompt else completion.text
        record = {
            "prompt": completion.prompt,
            "text": text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stats": completion.stats.as_dict(),
        }
        if completion.logprobs is not None:
            record["logprobs"] = [each.as_dict() for each in completion.logprobs]
        sys.stdout.write(json_line(sys.stdout, record))
        sys.stdout.flush()
    log(completion.stats.summary())
    if compiled := llm.compile_seconds - compiled:
        log(f"Compiling took {compiled:.0f} s before the first token.")
