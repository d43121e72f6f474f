"""`litspec bench`"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from litspec.types import BenchDrafterName, PlacementName, Precision, SamplerName


def bench(
    checkpoint_dir: str | None = None,
    draft_dir: str | None = None,
    *,
    drafter: BenchDrafterName = "all",
    prompts_file: str | None = None,
    speculative_k: str = "1,2,4,7,auto",
    max_new_tokens: int = 100,
    repeats: int = 5,
    temperature: float = 0.0,
    top_k: int | None = 50,
    top_p: float = 1.0,
    sampler: SamplerName = "rejection",
    seed: int = 1234,
    simulate_acceptance: float | None = None,
    exit_layer: int | None = None,
    verify_width: int = 8,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    placement: PlacementName = "auto",
    precision: Precision | None = None,
    draft_precision: Precision | None = None,
    draft_device: str | None = None,
    output_format: Literal["text", "json"] = "text",
    plot: str | None = None,
) -> int:
    """Measure a pair on this machine: what speculation brings, what it could bring, and which drafter and k to use.

    Everything runs in one process, interleaved, and is reported as medians. Plain decoding, the measure of every
    speedup, is one row a step without a drafter.

    Args:
        checkpoint_dir: Folder of the target in LitGPT's format, or its name below checkpoints/. Without it the embedded
            demonstration pair is measured.
        draft_dir: Folder of the draft model.
        drafter: Which drafter to measure; all measures the draft model (where there is one), prompt_lookup and
            early_exit.
        prompts_file: Text file with a prompt on each line; by default a few are built in.
        speculative_k: Proposals a round, a list with commas: whole numbers below verify_width, or auto.
        max_new_tokens: Tokens of each text.
        repeats: How often everything is measured.
        temperature: Divides the logits; 0 is greedy.
        top_k: Only the k most likely tokens; null for all.
        top_p: Only the most likely tokens that hold this probability together.
        sampler: rejection or coupled, where the temperature is above 0.
        seed: Of the texts.
        simulate_acceptance: Propose the target's own text, with this share of right tokens, at each drafter's cost:
            what a draft of that quality would bring here. Greedy or coupled only.
        exit_layer: Layers that draft in early_exit; a quarter of them by default.
        verify_width: Rows the target verifies at once.
        accelerator: As in Lightning Fabric: auto, cpu, cuda, mps.
        devices: How many devices, or auto for all.
        num_nodes: How many machines.
        placement: Where the weights live.
        precision: Of the target's weights; by default bf16-true on a GPU that has it, 32-true on a CPU.
        draft_precision: Of the draft model's weights; by default the target's.
        draft_device: Device of the draft model; by default the target's.
        output_format: text prints tables, json one object.
        plot: File for a picture of the speeds, such as bench.png.
    """
    from rich.console import Console
    from rich.progress import Progress

    from litspec.benchmark import measure, plot_report
    from litspec.commands.verify import read_prompts
    from litspec.errors import InputError
    from litspec.llm import SpecLLM
    from litspec.sampling import Sampling

    ks = _parse_ks(speculative_k, verify_width)
    sampling = Sampling(temperature, top_k, top_p, sampler)
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, got {repeats}")
    if max_new_tokens < 8:
        raise InputError(f"max_new_tokens must be at least 8 for a measurement, got {max_new_tokens}")
    if simulate_acceptance is not None:
        if not 0 <= simulate_acceptance <= 1:
            raise InputError(f"simulate_acceptance must be in [0, 1], got {simulate_acceptance}")
        if not (sampling.greedy or sampler == "coupled"):
            raise InputError(
                "simulate_acceptance needs a text that does not depend on the drafter: --temperature 0 or "
                f"--sampler coupled, got temperature {temperature} with the rejection sampler"
            )
    llm = SpecLLM.load(
        checkpoint_dir,
        draft_dir,
        verify_width=verify_width,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        placement=placement,
        precision=precision,
        draft_precision=draft_precision,
        draft_device=draft_device,
    )
    names = [drafter]
    if drafter == "all":
        names = ["prompt_lookup", "early_exit"]
        if llm.placed.draft_model is not None:
            names.insert(0, "draft_model")
    drafters = {name: llm.with_drafter(name, exit_layer=exit_layer).drafter for name in names}
    prompts = read_prompts(prompts_file)

    console = Console(stderr=True)
    quiet = not llm.placed.is_rank_zero
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=(repeats + 1) * (2 + len(drafters) * len(ks)))
        report = measure(
            llm,
            drafters,
            prompts,
            ks=ks,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed,
            simulate_acceptance=simulate_acceptance,
            progress=lambda: progress.advance(task),
        )
    if quiet:
        return 0
    if plot is not None:
        plot_report(report, plot)
    if output_format == "json":
        print(json.dumps(report.as_dict()))
    else:
        _print(llm.describe(), report)
    return 0


def _parse_ks(text: str, verify_width: int) -> list[Any]:
    from litspec.errors import InputError

    ks: list[Any] = []
    for item in text.split(","):
        item = item.strip()
        if item != "auto" and not (item.isdigit() and 0 < int(item) < verify_width):
            raise InputError(
                f"speculative_k must be a list such as 1,2,4,auto of whole numbers below verify_width = {verify_width} "
                f"or auto, got {text!r}"
            )
        ks.append(item if item == "auto" else int(item))
    return ks


def _print(description: str, report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    # Wide enough when it goes to a file, where rich would otherwise fold at 80 columns.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    parts = report.parts
    console.print(description, markup=False)

    table = Table("part", "ms", title="What a round is made of (medians; sampling and the read included)")
    for width, seconds in parts.verify.items():
        table.add_row("plain step (1 row)" if width == 1 else f"verification of {width} rows", f"{seconds * 1e3:.2f}")
    for name, seconds in parts.draft.items():
        table.add_row(f"draft step, {name}", f"{seconds * 1e3:.3f}")
    table.add_row(f"prefill of {parts.prompt_size} tokens", f"{parts.prefill * 1e3:.2f}")
    console.print(table)
    speed = parts.weight_bytes / parts.verify[1]
    console.print(
        f"A plain step reads {parts.weight_bytes / 1e6:.1f} MB of weights at {speed / 1e9:.2f} GB/s, "
        f"{parts.bandwidth_share:.0%} of what a copy moves here ({parts.copy_bandwidth / 1e9:.1f} GB/s)."
    )

    table = Table(
        "drafter",
        "k",
        "rows",
        "tokens/s",
        "acceptance",
        "tokens/round",
        "speedup",
        "ideal",
        "efficiency",
        title="Decoding after the prefill; speedup over plain decoding",
    )
    for run in report.runs:
        drafted = run.drafter != "none"
        table.add_row(
            run.drafter if drafted else ("none (plain)" if run.width == 1 else "none"),
            str(run.k) if drafted else "",
            str(run.width),
            f"{run.tokens_per_second:.0f}",
            f"{run.acceptance_rate:.2f}" if drafted else "",
            f"{run.tokens_per_round:.2f}",
            f"{run.speedup:.2f}",
            f"{run.ideal:.2f}",
            f"{run.efficiency:.2f}",
        )
    console.print(table)
    console.print(report.advice, markup=False)
