"""`litspec bench`"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, Literal

from litspec.arguments import spelled_out
from litspec.commands.lines import LogLines, loading
from litspec.config import FLAG_DEFAULTS, FOR_TEXTS, GenerateConfig, LoadConfig
from litspec.types import BenchDrafterName


@spelled_out(
    flags=True,
    without=(
        "drafter",
        "draft_placement",
        "quantize",
        "sys_prompt",
        "min_new_tokens",
        "speculative_k",
        "stop",
        *FOR_TEXTS,
    ),
    defaults=FLAG_DEFAULTS | {"temperature": 0.0, "max_new_tokens": 64},
    load=LoadConfig,
    settings=GenerateConfig,
)
def bench(
    load: LoadConfig,
    *,
    drafter: BenchDrafterName = "all",
    heads: str = "",
    prompts_file: str | None = None,
    speculative_k: str = "1,2,4,7,auto",
    repeats: int = 5,
    batch_size: str = "",
    settings: GenerateConfig,
    simulate_acceptance: float | None = None,
    output_format: Literal["text", "json"] = "text",
    plot: str | None = None,
    quick: bool = False,
) -> int:
    """Measure a pair on this machine: the speedup, the ideal speedup, and the best drafter and k.

    All runs are in one process, interleaved, and reported as medians. Speedups are relative to plain decoding, which is
    one row per step without a drafter. Each drafter generates every text with each k, repeats times. With the defaults
    this takes about a minute for the embedded pair on two cores, and longer on a busy machine.

    Args:
        {load}
        drafter: The drafter to measure; all measures the draft model or head of draft_dir (if there is one),
            prompt_lookup and early_exit.
        heads: More folders of published or trained heads for this target, separated by commas, to compare with the
            other drafters.
        prompts_file: Text file with one prompt per line; by default three built-in prompts.
        speculative_k: Proposals per round, a comma-separated list of whole numbers below verify_width, or auto.
        repeats: Number of repetitions.
        batch_size: Batch sizes, a comma-separated list such as 1,4,16. For each, many texts are generated with the best
            drafter and without.
        {settings}
        simulate_acceptance: Propose the target's own text with this acceptance, at each drafter's cost, to estimate the
            speed with a draft of that quality. Each proposal is right with this probability if those before it in its
            round were. Greedy or coupled only.
        output_format: text prints tables, json one object.
        plot: File for a plot of the speeds, such as bench.png.
        quick: Use one prompt, at most 32 new tokens and 2 repeats: faster but less exact.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from litspec.benchmark import check_plot, measure, plain_decoder, plot_report
    from litspec.commands.generate import announce_compiling
    from litspec.commands.verify import PROMPTS, read_prompts
    from litspec.drafters.folders import load_published
    from litspec.errors import InputError
    from litspec.llm import SpecLLM
    from litspec.placement import process_rank
    from litspec.sampling import Sampling

    verify_width, max_new_tokens = load.verify_width, settings.max_new_tokens
    assert settings.seed is not None, "the flag has a default"
    # All settings are checked before loading.
    if verify_width < 2:
        raise InputError(f"verify_width must be at least 2, so that there is room for a proposal, got {verify_width}")
    ks = _parse_ks(speculative_k, verify_width)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.sampler)
    batch_sizes = _parse_batch_sizes(batch_size)
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, got {repeats}")
    if max_new_tokens < 8:
        raise InputError(f"max_new_tokens must be at least 8 for a measurement, got {max_new_tokens}")
    if simulate_acceptance is not None:
        if not 0 <= simulate_acceptance <= 1:
            raise InputError(f"simulate_acceptance must be in [0, 1], got {simulate_acceptance}")
        if not (sampling.greedy or sampling.sampler == "coupled"):
            raise InputError(
                "simulate_acceptance needs a text that does not depend on the drafter: --temperature 0 or "
                f"--sampler coupled, got temperature {sampling.temperature} with the rejection sampler"
            )
    prompts = list(PROMPTS[:3]) if prompts_file is None else read_prompts(prompts_file)
    if quick:
        prompts, repeats, max_new_tokens = prompts[:1], min(repeats, 2), min(max_new_tokens, 32)
    if plot is not None and process_rank() == 0:
        check_plot(plot)

    folders = [item.strip() for item in heads.split(",") if item.strip()]
    kinds = {folder: _head_kind(folder) for folder in folders}

    given = replace(load, drafter="auto" if drafter == "all" else drafter)
    alone = replace(load, draft_dir=None, drafter="none", verify_width=1, draft_precision=None, draft_device=None)
    with loading(load.checkpoint_dir):
        llm = SpecLLM.load(**vars(given))
    plain = plain_decoder(llm, lambda: SpecLLM.load(**vars(alone)))
    if load.compile and llm.placed.is_rank_zero:
        announce_compiling(llm.runner)
    names: list[Any] = [drafter]
    if drafter == "all":
        names = ["prompt_lookup", "early_exit"]
        if llm.draft_name is not None:
            names.insert(0, "draft_model")

    console = Console(stderr=True)
    quiet = not llm.placed.is_rank_zero
    lines = LogLines("measuring", quiet=quiet or console.is_terminal)

    # Drawn only between timings: a drawing thread would disturb them.
    with Progress(
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task("measuring", total=None)

        def progressed(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)
            lines.update(done, total)

        report = measure(
            llm,
            plain,
            names,
            prompts,
            ks=ks,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            exit_layer=load.exit_layer,
            heads={folder: load_published(folder, kind, llm.placed.model) for folder, kind in kinds.items()},
            seed=settings.seed,
            simulate_acceptance=simulate_acceptance,
            batch_sizes=batch_sizes,
            progress=progressed,
        )
    if quiet:
        return 0
    if output_format == "json":
        print(json.dumps(report.as_dict()))
    else:
        _print(llm.describe(), report)
    # Last, so that results are printed even if the plot cannot be written.
    if plot is not None:
        plot_report(report, plot)
    return 0


def _head_kind(folder: str) -> Any:
    """The kind of drafter in a folder that must hold a head."""
    from litspec.drafters.folders import kind_of
    from litspec.errors import InputError

    kind = kind_of(folder)
    if kind == "litgpt":
        raise InputError(f"heads names {folder!r}, which is not the folder of a head; give a checkpoint as draft_dir.")
    return kind


def _parse_ks(text: str, verify_width: int) -> list[Any]:
    from litspec.errors import InputError

    ks: list[Any] = []
    for item in text.split(","):
        item = item.strip()
        if item != "auto" and not (item.isdecimal() and 0 < int(item) < verify_width):
            raise InputError(
                f"speculative_k must be a list such as 1,2,4,auto of whole numbers below verify_width = {verify_width} "
                f"or auto, got {text!r}"
            )
        ks.append(item if item == "auto" else int(item))
    return list(dict.fromkeys(ks))


def _parse_batch_sizes(text: str) -> list[int]:
    from litspec.errors import InputError

    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise InputError(f"batch_size must be a list such as 1,4,16 of whole numbers of at least 1, got {text!r}")
    return list(dict.fromkeys(map(int, items)))


def _print(description: str, report: Any) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # For a file, 120 columns: rich would otherwise wrap at 80.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    parts, settings = report.parts, report.settings
    for line in description.splitlines():
        if not line.startswith(("Drafter:", "No drafter:")):  # several drafters are measured
            console.print(line, markup=False)

    def table(heading: str, *columns: str, left: int) -> Table:
        console.print(f"\n[bold]{heading}[/]")
        made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)  # 80 columns are enough
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i < left else "right")
        return made

    plain = parts.verify[1]
    made = table("Parts of a round (medians, including sampling and the read)", "part", "ms", "plain steps", left=1)
    rows = [("plain step (1 row)" if w == 1 else f"verification of {w} rows", t) for w, t in parts.verify.items()]
    rows += [(f"draft step, {name}", seconds) for name, seconds in parts.draft.items()]
    rows.append((f"prefill of {parts.prompt_size} tokens", parts.prefill))
    for name, seconds in rows:
        made.add_row(name, f"{seconds * 1e3:.3f}", f"{seconds / plain:.3f}")
    console.print(made)
    console.print(
        f"A plain step reads {parts.weight_bytes / 1e6:.1f} MB of weights at {parts.weight_bandwidth / 1e9:.2f} GB/s, "
        f"{parts.weight_bandwidth / parts.copy_bandwidth:.0%} of the bandwidth of a copy "
        f"({parts.copy_bandwidth / 1e9:.1f} GB/s)."
    )

    if settings["compile_seconds"]:
        console.print(f"Compiling {settings['compiled_steps']} steps took {settings['compile_seconds']:.0f} s.")

    heading = f"Decoding after the prefill ({settings['prompts']} prompts, medians of {settings['repeats']})"
    if (rate := settings["simulate_acceptance"]) is not None:
        heading += f", {rate:.0%} right proposals simulated"
    made = table(
        heading,
        "drafter",
        "k",
        "tokens\n/ s",
        "accepted",
        "tokens\n/ round",
        "speedup",
        "ideal",
        "speedup\n/ ideal",
        left=1,
    )
    for i, run in enumerate(report.runs):
        drafted = run.drafter != "none"
        if i and run.drafter != report.runs[i - 1].drafter:
            made.add_section()
        made.add_row(
            run.drafter if drafted else ("plain (1 row)" if run.width == 1 else f"none, {run.width} rows"),
            str(run.k) if drafted else "",
            f"{run.tokens_per_second:.{0 if run.tokens_per_second >= 100 else 1}f}",
            f"{run.acceptance_rate:.2f}" if drafted else "",
            f"{run.tokens_per_round:.2f}",
            f"{run.speedup:.2f}",
            f"{run.ideal:.2f}",
            f"{run.efficiency:.2f}",
        )
    console.print(made)
    if report.batches:
        heading = f"Many texts, including prompts, by batch size (medians of {settings['repeats']})"
        made = table(heading, "batch size", "plain\ntokens / s", "speculative\ntokens / s", "speedup", left=0)
        for batch in report.batches:
            made.add_row(str(batch.size), f"{batch.plain:.0f}", f"{batch.speculative:.0f}", f"{batch.speedup:.2f}")
        console.print(made)
    console.print(report.advice, markup=False, soft_wrap=True)
