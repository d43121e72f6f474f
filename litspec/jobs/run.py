"""`run_job`: the loop over prompts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from litspec.config import FLAG_DEFAULTS, FORMS, GenerateConfig, LoadConfig, check_batch_size, check_k
from litspec.errors import InputError
from litspec.jobs.deciding import deciding, resolved
from litspec.jobs.disk import digest, dump, log
from litspec.jobs.files import Answer, Done, JobFiles, PartFile, Parts, Results
from litspec.jobs.progress import Interrupts, Meter
from litspec.jobs.prompts import Prompts, Request
from litspec.jobs.ranks import Team
from litspec.llm import Completion, SpecLLM, text_seed
from litspec.placement import LostRank, process_rank

SOME_FAILED = 1
TERMINATED = 128 + signal.SIGTERM
MERGE_SECONDS = 0.1  # between two reads of the files of other ranks
WINDOW = 16  # prompts per slot that are sorted by length


def run_job(
    prompts_file: str | Path,
    out_file: str | Path,
    *,
    load: Mapping[str, Any],
    num_samples: int = 1,
    batch_size: int | Literal["auto"] = "auto",
    **settings: Any,
) -> int:
    """Generates a text for every prompt of a file, or resumes an interrupted job.

    The random numbers of a text come from a hash of the seed and the prompt's number. So a text does not depend on
    other prompts, on interruptions, or on the number of ranks.

    Args:
        prompts_file: Prompts, one per line, see `prompts.Prompts`.
        out_file: The file for the texts. It must not exist, or be that of an earlier run of the same job.
        load: Arguments of `SpecLLM.load`.
        num_samples: Number of texts per prompt.
        batch_size: The most texts that a rank generates at the same time. "auto" uses as many as fit in
            memory and increase throughput. Texts do not depend on it, and a job can be resumed with another value.
        settings: Arguments of `SpecLLM.generate`. A line of `prompts_file` can override them for its own text.

    Returns:
        The exit code: 0 when every prompt has its texts, 1 when some have an error instead, 143 after SIGTERM. Ranks
        other than rank 0 return 0.

    Raises:
        InputError: A file or setting cannot be used, `out_file` belongs to another job or is in use by another process,
            or the disk is full. Finished texts are kept.
    """
    batch_size = check_batch_size(batch_size)
    load = vars(LoadConfig(**load))
    settings = vars(GenerateConfig(**{"seed": FLAG_DEFAULTS["seed"], **settings}))
    if settings["seed"] is None:
        raise InputError("seed must be a whole number, so that the job can be resumed, got None")
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
                log(f"{str(files.out)!r} is complete; there is nothing left to do. {files.summarize()}")
            return SOME_FAILED if done.errors and first else 0
        llm = SpecLLM.load(**load)
        if llm.placed.is_rank_zero and not first:
            raise InputError("Several processes were launched, but the placement uses only one; choose 'replicate'.")
        if first:
            log(llm.describe())
            if repeated := prompts.repeated_ids():
                more = f" and {len(repeated) - 10} more" if len(repeated) > 10 else ""
                log(
                    f"More than one prompt has the id {', '.join(map(str, repeated[:10]))}{more}; only the order of "
                    "the lines distinguishes their texts."
                )
        team = Team(llm.placed)
        results = None
        try:
            # Check the settings once here, so that an invalid one is not reported for every line.
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
            _work(llm, team, prompts, files, done, results, settings, job, batch_size)
        except LostRank as error:
            raise InputError(f"{error} The same command resumes the job.") from error
        if results is None:
            return 0
        if results.next == len(prompts):
            files.remove_parts()
            log(files.summarize())
            return SOME_FAILED if results.errors else 0
        if team.failed:
            raise InputError("Another rank could not continue (see its message); the same command resumes the job.")
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
    batch_size: int | Literal["auto"],
) -> None:
    """Generates the missing texts, until all are written or the job is asked to stop.

    Args:
        llm: The pair.
        team: The ranks.
        prompts: The prompts.
        files: The job's files.
        done: What an earlier run left.
        results: The files that rank 0 writes; None on other ranks.
        settings: Arguments of `SpecLLM.generate`.
        job: Hash of all settings that decide the texts.
        batch_size: See `run_job`.
    """
    parts = Parts(files, job)
    if results is not None and done.begun:
        parts.refresh()
        finished = done.lines + parts.count_from(done.lines)
        log(f"Resuming {str(files.out)!r}: {finished} of {len(prompts)} texts are finished.")
    part: PartFile | None = None
    with Interrupts() as interrupts, Meter(done, len(prompts), shown=results is not None) as meter:

        def keep(answer: Answer | None = None) -> None:
            """Writes a text. Rank 0 also writes the next texts that other ranks have finished."""
            with interrupts.held():
                if answer is not None and part is not None:
                    part.put(answer)
                    meter.add_early(answer)
                elif answer is not None and results is not None:
                    results.put(answer)
                    meter.add(answer)
                if results is not None:
                    if part is not None:
                        parts.refresh()
                    while results.next in parts:
                        written = parts.take(results.next)
                        results.put(written)
                        meter.add(written)

        try:
            parts.refresh()
            numbers = [number for number in team.share(prompts, done.lines) if number not in parts]
            need = _longest(llm, [prompts[number] for number in numbers], settings)
            slots = llm.slots_for(batch_size, len(numbers), need) if need else 1
            if slots > 1:
                numbers = _longest_first(prompts, numbers, slots)
            if need:
                llm.reserve(need, slots)
            if team.sharing or (slots > 1 and results is not None):
                # Texts finish in a different order from the prompts.
                part = files.new_part(team.placed.rank, job)
            keep()
            _generate(llm, team, prompts, numbers, settings, slots, interrupts, meter, keep)
            if part is not None:
                part.close()
                part = None
                while team.sharing and results is not None and results.next < len(prompts) and not team.stopped:
                    time.sleep(MERGE_SECONDS)
                    parts.refresh()
                    keep()
                    if interrupts.stopping:
                        team.stop()
                if team.sharing:
                    team.wait()
                parts.refresh()
                keep()
        except BaseException as error:
            team.stop(failed=not isinstance(error, KeyboardInterrupt))
            if not team.leading:
                with suppress(LostRank):
                    team.wait()  # on these ranks it only reports that they have finished
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
    slots: int,
    interrupts: Interrupts,
    meter: Meter,
    keep: Callable[[Answer], None],
) -> None:
    """Generates this rank's texts, up to `slots` at a time, until all are done or the job is asked to stop.

    Ranks that generate each text together work in lockstep. If one of them cannot write a text, all end when the
    running texts have finished.
    """
    todo = iter(numbers)
    failure: BaseException | None = None

    def kept(answer: Answer) -> None:
        nonlocal failure
        try:
            if failure is None:
                keep(answer)
        except BaseException as error:
            if team.sharing or team.placed.world_size == 1:
                raise
            failure = error

    def wanted() -> Iterator[tuple[int, str, GenerateConfig, int]]:
        while True:
            if interrupts.stopping or failure is not None:
                team.stop()
            number = team.next(Team.STOP if team.stopped else next(todo, Team.END))
            if number < 0:
                return
            request = prompts[number]
            try:
                if request.error is not None:
                    raise InputError(request.error)
                config = _settings_of(request, settings)
            except InputError as refused:
                kept(_refused(request, number, str(refused)))
                continue
            meter.running += 1
            yield number, request.prompt, config, request.index

    try:
        for number, result in llm.complete(wanted(), slots=slots):
            meter.running -= 1
            request = prompts[number]
            if isinstance(result, InputError):
                kept(_refused(request, number, str(result)))
            else:
                kept(_finished(request, number, result))
    except torch.OutOfMemoryError as full:
        # No error is written for the prompts: they may fit with a smaller batch or on another device.
        raise InputError(
            f"The device has no memory left for {slots} texts at the same time; run the same command again with a "
            "smaller batch_size, other devices or another placement. Finished texts are kept."
        ) from full
    if failure is not None:
        raise failure


def _settings_of(request: Request, settings: Mapping[str, Any]) -> GenerateConfig:
    """The settings of one text.

    Raises:
        InputError: A value is out of its range.
    """
    given = {**settings, **request.settings}
    if not request.settings.keys().isdisjoint(FORMS):
        # A line with its own form (schema, regex, grammar) replaces the form of the job.
        given |= {name: request.settings.get(name) for name in FORMS}
    if request.sample:
        # The first sample uses the seed itself, so that it does not depend on num_samples.
        given["seed"] = text_seed(given["seed"], request.sample)
    return GenerateConfig(**given)


def _refused(request: Request, number: int, error: str) -> Answer:
    return Answer(number, dump(request.head | {"error": error}), dump(request.head | {"error": True}))


def _finished(request: Request, number: int, completion: Completion) -> Answer:
    line: dict[str, Any] = {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [each.as_dict() for each in completion.logprobs]
    return Answer(number, dump(request.head | line), dump(request.head | completion.stats.as_dict()))


def _longest_first(prompts: Prompts, numbers: Sequence[int], slots: int) -> list[int]:
    """The order in which texts start: within a window of `WINDOW * slots` prompts the longest first.

    Short texts then run last, when fewer texts run together. Only a window is sorted, because the out file keeps the
    order of the prompts and should grow while the job runs.
    """
    window = WINDOW * slots
    found: list[int] = []
    for start in range(0, len(numbers), window):
        found += sorted(numbers[start : start + window], key=lambda number: -len(prompts[number].prompt or ""))
    return found


def _longest(llm: SpecLLM, requests: Sequence[Request], settings: Mapping[str, Any]) -> int:
    """Tokens of the longest text, prompt and completion together, for which the caches are allocated at once.

    Replacing a cache when a longer prompt comes would lose the prefix that prompts share. Only the prompts with the
    most characters are encoded. If that misses the longest one, the cache is replaced after all.
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
    return need
