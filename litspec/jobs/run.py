"""`run_job`: the loop over prompts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from litspec.config import FLAG_DEFAULTS, GenerateConfig, LoadConfig, check_k
from litspec.errors import InputError
from litspec.jobs.deciding import deciding, resolved
from litspec.jobs.disk import digest, dump, log
from litspec.jobs.files import Answer, Done, JobFiles, PartFile, Parts, Results
from litspec.jobs.progress import Interrupts, Meter
from litspec.jobs.prompts import Prompts, Request
from litspec.jobs.ranks import Team
from litspec.llm import SpecLLM, text_seed
from litspec.placement import LostRank, process_rank

SOME_FAILED = 1
TERMINATED = 128 + signal.SIGTERM
MERGE_SECONDS = 0.1  # between two looks at what other ranks have written


def run_job(
    prompts_file: str | Path,
    out_file: str | Path,
    *,
    load: Mapping[str, Any],
    num_samples: int = 1,
    **settings: Any,
) -> int:
    """Generates a text for every prompt of a file, or goes on with that.

    A text's random numbers come from a hash of the seed and the prompt's number, so it depends on no other prompt, nor
    on how often the job was interrupted or how many ranks shared it.

    Args:
        prompts_file: Prompts, one a line, see `prompts.Prompts`.
        out_file: Where the texts go. It must not exist, or be what an earlier run of the same job left.
        load: Arguments of `SpecLLM.load`.
        num_samples: Texts for each prompt.
        settings: Arguments of `SpecLLM.generate`; a line of `prompts_file` may say otherwise for itself.

    Returns:
        The exit code: 0 when every prompt has its texts, 1 when some have an error instead, 143 after SIGTERM. 0 on all
        ranks but the first.

    Raises:
        InputError: A file or setting that cannot be used, an `out_file` of another job or in use by another process, a
            full disk. What was finished before is kept.
    """
    load = vars(LoadConfig(**load))
    settings = vars(GenerateConfig(**{"seed": FLAG_DEFAULTS["seed"], **settings}))
    if settings["seed"] is None:
        raise InputError("seed must be a whole number for a job, which could not be resumed else, got None")
    if load["drafter"] != "none":
        check_k(settings["speculative_k"], load["verify_width"])
    prompts = Prompts(prompts_file, num_samples)
    files = JobFiles(out_file)
    first = process_rank() == 0
    with files.locked() if first else nullcontext():
        wanted = deciding(prompts, load, settings)
        done = files.look(prompts, wanted)
        if done.lines == len(prompts):
            if first:
                files.remove_parts()
                log(f"{str(files.out)!r} is complete, nothing is left to do.")
            return SOME_FAILED if done.errors and first else 0
        llm = SpecLLM.load(**load)
        if llm.placed.is_rank_zero and not first:
            raise InputError("Several processes were launched, but the placement has work for one; use 'replicate'.")
        if first:
            log(llm.describe())
        team = Team(llm.placed)
        results = None
        try:
            # A setting that no prompt can use is refused at once, and not line by line.
            llm.generate("a", stream=True, **settings)
            if first:
                wanted |= resolved(llm, wanted)
                results = files.begin(prompts, done, wanted, llm.placed.device)
        except BaseException:
            team.agree(0)
            raise
        job = team.agree(int(digest(dump(dict(sorted(wanted.items()))))[:15], 16))
        if not job:
            return 0
        try:
            _work(llm, team, prompts, files, done, results, settings, job)
        except LostRank as error:
            raise InputError(f"{error} The same command resumes the job.") from error
        if results is None:
            return 0
        if results.next == len(prompts):
            files.remove_parts()
            return SOME_FAILED if results.errors else 0
        if team.failed:
            raise InputError("Another rank could not go on, see its message; the same command resumes the job.")
        return TERMINATED


def _work(
    llm: SpecLLM,
    team: Team,
    prompts: Prompts,
    files: JobFiles,
    done: Done,
    results: Results | None,
    settings: Mapping[str, Any],
    job: int,
) -> None:
    """Generates what is missing, until all of it is there or somebody wants an end.

    Args:
        llm: The pair.
        team: The ranks.
        prompts: The prompts.
        files: The job's files.
        done: What there was.
        results: On the rank that leads, the files that it writes.
        settings: Arguments of `SpecLLM.generate`.
        job: A hash of all that decides the texts.
    """
    parts = Parts(files, job)
    part: PartFile | None = None
    with Interrupts() as interrupts, Meter(done, len(prompts), shown=results is not None) as meter:

        def keep(answer: Answer | None = None) -> None:
            """Writes a text down, and on the first rank all that have come from elsewhere and are next."""
            with interrupts.held():
                if answer is not None and part is not None:
                    part.put(answer)
                elif answer is not None and results is not None:
                    meter.add(results.put(answer))
                if results is not None:
                    if part is not None:
                        parts.refresh()
                    while results.next in parts:
                        meter.add(results.put(parts.take(results.next)))

        try:
            parts.refresh()
            numbers = [number for number in team.share(prompts, done.lines) if number not in parts]
            if team.sharing:
                part = files.new_part(team.placed.rank, job)
            _reserve(llm, [prompts[number] for number in numbers], settings)
            keep()
            _generate(llm, team, prompts, numbers, settings, interrupts, keep)
            if part is not None:
                part.close()
                part = None
                while results is not None and results.next < len(prompts) and not team.stopped:
                    time.sleep(MERGE_SECONDS)
                    parts.refresh()
                    keep()
                    if interrupts.stopping:
                        team.stop()
                team.wait()
                parts.refresh()
                keep()
        except BaseException as error:
            team.stop(failed=not isinstance(error, KeyboardInterrupt))
            if not team.leading:
                with suppress(LostRank):
                    team.wait()  # it only tells that this rank has ended
            raise
        finally:
            try:
                if part is not None:
                    part.close()
            finally:
                if results is not None:
                    results.close()


def _generate(
    llm: SpecLLM,
    team: Team,
    prompts: Prompts,
    numbers: Sequence[int],
    settings: Mapping[str, Any],
    interrupts: Interrupts,
    keep: Callable[[Answer], None],
) -> None:
    """Generates this rank's texts one after the other, until it is through or somebody wants an end."""
    todo = iter(numbers)
    while True:
        if interrupts.stopping:
            team.stop()
        number = team.next(Team.STOP if team.stopped else next(todo, Team.END))
        if number < 0:
            return
        answer = _answer(llm, prompts[number], number, settings)
        try:
            keep(answer)
        except BaseException:
            team.next(Team.STOP)  # ranks that make each text together wait for the next one
            raise


def _answer(llm: SpecLLM, request: Request, number: int, settings: Mapping[str, Any]) -> Answer:
    """Generates one text, or says why there is none."""
    error = request.error
    if error is None:
        given = {**settings, **request.settings}
        if request.sample:
            # The first sample has the seed itself: asking for more samples does not change it.
            given["seed"] = text_seed(given["seed"], request.sample)
        try:
            completion = llm.generate(request.prompt, index=request.index, **given)
        except InputError as refused:
            error = str(refused)
        except torch.OutOfMemoryError as full:
            # Not the prompt's fault, so nothing to write down: elsewhere there may be room for it.
            raise InputError(
                f"The device has no memory left for prompt {request.id!r}; run the same command again with other "
                "devices or another placement: what is finished is kept."
            ) from full
    if error is not None:
        return Answer(number, dump(request.head | {"error": error}), dump(request.head | {"error": True}))
    line: dict[str, Any] = {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [each.as_dict() for each in completion.logprobs]
    return Answer(number, dump(request.head | line), dump(request.head | completion.stats.as_dict()))


def _reserve(llm: SpecLLM, requests: Sequence[Request], settings: Mapping[str, Any]) -> None:
    """Gives the pair caches at once that the longest text fits.

    One that is replaced as prompts grow would have to read again what they have in common. The longest are looked for
    among the prompts with most characters; should that miss one, the cache is replaced after all.
    """
    room = llm.placed.model.config.block_size
    longest = sorted(
        (request for request in requests if request.error is None and not request.sample),
        key=lambda request: len(request.prompt) + request.settings.get("max_new_tokens", 0),
    )
    need, fitting = 0, 0
    for request in longest[:-65:-1]:
        given = {**settings, **request.settings}
        with suppress(InputError):
            size = llm.codec.encode(request.prompt, given["sys_prompt"]).numel() + given["max_new_tokens"]
            if size <= room:
                need, fitting = max(need, size), fitting + 1
        if fitting == 4:
            break
    if need:
        llm.reserve(need)
