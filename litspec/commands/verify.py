"""`litspec verify`"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from litspec.arguments import spelled_out
from litspec.commands.lines import LogLines, loading
from litspec.config import FLAG_DEFAULTS, FOR_TEXTS, GenerateConfig, LoadConfig
from litspec.types import DrafterName

# Text that any language model can continue.
PROMPTS = (
    "It was a truth universally acknowledged, that",
    "She had never been so happy in her life, and yet",
    "The letter was short:",
    "Mr. Elliot bowed, and",
    "one two three one two three one two",
    "Dear Anne, I hope that you are well. I hope that",
)
# Contexts at which the drafter's reported distribution is tested, and draws per context.
CONTEXTS, DRAWS = 20, 4096
# Rounds on table models to test the accept rule.
TABLE_DRAWS = 50_000


@dataclass
class Difference:
    """The first difference between the text with a drafter and the text of the target alone.

    Attributes:
        prompt: Index of the prompt.
        index: Index of the first token that differs.
        alone: The target's token without a drafter; None past the end of the text.
        drafted: The token with a drafter; None past the end of the text.
        margin: Difference of the two tokens' logits (with the sampler's noise).
        verdict: "rounding tie" if the margin is below the precision's resolution, else "fault".
    """

    prompt: int
    index: int
    alone: int | None
    drafted: int | None
    margin: float
    verdict: Literal["rounding tie", "fault"]


@dataclass
class Check:
    """One line of the report."""

    name: str
    passed: bool
    detail: str
    differences: list[Difference]


@spelled_out(
    flags=True,
    without=(
        "drafter",
        "draft_placement",
        "quantize",
        "sys_prompt",
        "min_new_tokens",
        "sampler",
        "speculative_k",
        "stop",
        *FOR_TEXTS,
    ),
    defaults=FLAG_DEFAULTS | {"max_new_tokens": 128},
    load=LoadConfig,
    settings=GenerateConfig,
)
def verify(
    load: LoadConfig,
    *,
    prompts_file: str | None = None,
    settings: GenerateConfig,
    quick: bool = False,
    output_format: Literal["text", "json"] = "text",
) -> int:
    """Verify on your own pair that speculation changes the speed, never the text.

    Every prompt is decoded by the target alone and with every available drafter, greedy and with the coupled sampler.
    The tokens must be equal. The rejection sampler keeps the target's distribution instead: its accept rule is tested
    on table models, and the drafter's reported distribution is compared with its draws. The exit code is 0 if all
    checks pass, else 1.

    Args:
        {load}
        prompts_file: Text file with one prompt per line; by default a few built-in prompts.
        {settings}
        quick: Use the first two prompts, at most 32 new tokens, and few draws at few contexts: faster but weaker.
        output_format: text prints a table, json one object.
    """
    from litspec.errors import InputError

    verify_width, seed = load.verify_width, settings.seed
    assert seed is not None, "the flag has a default"
    if verify_width < 2:
        raise InputError(f"verify_width must be at least 2, so that there is room for a proposal, got {verify_width}")
    prompts = read_prompts(prompts_file)
    contexts, draws, table_draws = (4, 256, 5_000) if quick else (CONTEXTS, DRAWS, TABLE_DRAWS)
    if quick:
        prompts, settings = prompts[:2], replace(settings, max_new_tokens=min(settings.max_new_tokens, 32))

    from rich.console import Console
    from rich.progress import Progress

    from litspec.llm import SpecLLM

    with loading(load.checkpoint_dir):
        llm = SpecLLM.load(**vars(load))
    drafters: list[DrafterName] = ["prompt_lookup", "suffix", "early_exit"]
    if llm.draft_name is not None:
        drafters.insert(0, "draft_model")
    sampled = dict(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    modes: dict[str, dict[str, Any]] = {"greedy": dict(temperature=0.0), "coupled": dict(sampler="coupled", **sampled)}

    console = Console(stderr=True)
    quiet = not llm.placed.is_rank_zero
    checks: list[Check] = []
    lines = LogLines("verifying", quiet=quiet or console.is_terminal)
    steps = len(prompts) * len(modes) * (len(drafters) + 1) + contexts + 1
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=steps)

        def advance() -> None:
            progress.advance(task)
            lines.update(int(progress.tasks[0].completed), steps)

        for mode, chosen in modes.items():
            chosen = dict(chosen, max_new_tokens=settings.max_new_tokens, seed=seed)
            alone = _decode(llm.with_drafter("none"), prompts, chosen, advance)
            for drafter in drafters:
                with_drafter = llm.with_drafter(drafter, exit_layer=load.exit_layer)
                texts = _decode(with_drafter, prompts, chosen | {"speculative_k": verify_width - 1}, advance)
                checks.append(_compare(llm, f"{mode}, {drafter}", prompts, alone, texts, chosen))
        counts = contexts, draws, table_draws
        checks += _rejection_checks(llm, drafters[0], prompts, sampled, seed, verify_width - 1, counts, advance)
    if not quiet:
        _print(checks, llm.runner.rows(llm.placed.rows), output_format)
    return 0 if all(check.passed for check in checks) else 1


def read_prompts(prompts_file: str | None) -> list[str]:
    """The prompts in a file, one per line, without blank lines; the built-in ones if there is no file."""
    from litspec.errors import InputError

    if prompts_file is None:
        return list(PROMPTS)
    try:
        lines = Path(prompts_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts_file {prompts_file!r} cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"prompts_file {prompts_file!r} holds no prompt; write one prompt per line.")
    return prompts


def _decode(llm: Any, prompts: list[str], settings: dict[str, Any], advance: Any) -> list[Any]:
    completions = []
    for i, prompt in enumerate(prompts):
        completions.append(llm.generate(prompt, index=i, **settings))
        advance()
    return completions


def _compare(
    llm: Any, name: str, prompts: list[str], alone: list[Any], texts: list[Any], settings: dict[str, Any]
) -> Check:
    """Checks that the tokens of all texts are equal."""
    differences = [
        _difference(llm, i, prompt, a.token_ids, b.token_ids, settings)
        for i, (prompt, a, b) in enumerate(zip(prompts, alone, texts))
        if a.token_ids != b.token_ids
    ]
    proposed = sum(text.stats.proposed for text in texts)
    accepted = sum(text.stats.accepted for text in texts)
    detail = f"{len(prompts) - len(differences)}/{len(prompts)} texts equal, {accepted}/{proposed} proposals accepted"
    return Check(name, not differences, detail, differences)


def _difference(llm: Any, number: int, prompt: str, a: list[int], b: list[int], settings: dict[str, Any]) -> Difference:
    """Finds the first token that differs and the margin of the target's logits there."""
    import torch

    from litspec.engine.target import TargetSession
    from litspec.llm import text_seed
    from litspec.noise import gumbel_noise, position_keys
    from litspec.sampling import Sampling

    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    x, y = (ids[at] if at < len(ids) else None for ids in (a, b))
    if x is None or y is None:
        # One text stopped and the other continued. The stop is not among the tokens, so there is no margin.
        return Difference(number, at, x, y, float("nan"), "fault")
    ids = llm.codec.encode(prompt).tolist() + a[:at]
    target = TargetSession(llm.placed, len(ids) + 1)
    with torch.inference_mode():
        logits = target.prefill(ids)[0][0]
    resolution = 4 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    pair = torch.tensor([[x, y]], device=logits.device)
    scores = logits.float()[pair[0]]
    if settings.get("sampler") == "coupled":
        temperature = Sampling(settings["temperature"]).temperature
        keys = position_keys(text_seed(settings["seed"], number), torch.tensor([len(ids)], device=pair.device))
        noise = gumbel_noise(keys, pair)[0]
        scores = scores + temperature * noise
    margin = float(scores[0] - scores[1])
    return Difference(number, at, x, y, margin, "rounding tie" if abs(margin) < resolution else "fault")


def _rejection_checks(
    llm: Any,
    drafter: str,
    prompts: list[str],
    sampled: dict[str, Any],
    seed: int,
    k: int,
    counts: tuple[int, int, int],
    advance: Any,
) -> list[Check]:
    """Tests the accept rule on table models, and the drafter's honesty on the real pair.

    `counts` are the contexts for honesty, the draws per context, and the rounds on table models.
    """
    context_count, draws, table_draws = counts
    from litspec.sampling import Sampling
    from litspec.testing import P_VALUE, accept_rule_test, honesty

    rule = accept_rule_test(draws=table_draws, seed=seed)
    advance()
    detail = f"{table_draws:,} draws on table models, G-test p = {rule.p_value:.3g} (fails below {P_VALUE:.0e})"
    checks = [Check("rejection, accept rule", rule.p_value >= P_VALUE, detail, [])]
    if Sampling(**sampled).greedy:
        return checks
    # Contexts are prefixes of texts generated by the target.
    settings = dict(max_new_tokens=24, seed=seed, speculative_k=k, **sampled)
    texts = [llm.generate(prompt, index=i, **settings) for i, prompt in enumerate(prompts)]
    ids = [llm.codec.encode(p).tolist() + text.token_ids for p, text in zip(prompts, texts)]
    contexts = [ids[i % len(ids)][: max(2, len(ids[i % len(ids)]) - i)] for i in range(context_count)]
    tests = honesty(
        llm.with_drafter(drafter).drafter,
        llm,
        contexts,
        sampling=Sampling(**sampled),
        draws=draws,
        seed=seed,
        progress=advance,
    )
    worst = min((test.p_value for test in tests), default=1.0)
    # Bonferroni correction, so that all tests together have the false-alarm rate of one test.
    threshold = P_VALUE / max(1, len(tests))
    detail = (
        f"{len(tests)} contexts x {draws} draws against the reported q, worst G-test p = {worst:.3g} "
        f"(fails below {threshold:.0e}, which is {P_VALUE:.0e} / {len(tests)} tests)"
    )
    if not tests:
        detail = "it reports no distribution, so there is nothing to test"
    checks.append(Check(f"rejection, honesty of {drafter}", worst >= threshold, detail, []))
    return checks


def _print(checks: list[Check], rows: tuple[int, ...], output_format: str) -> None:
    if output_format == "json":
        passed = all(check.passed for check in checks)
        print(json.dumps({"passed": passed, "rows": rows, "checks": [asdict(check) for check in checks]}))
        return
    from rich.console import Console
    from rich.table import Table

    # For a file, 120 columns: rich would otherwise wrap at 80.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    found = ", ".join(map(str, rows))
    console.print(f"Row counts of a verification with equal bits here (a round uses one of them): {found}.")
    table = Table("check", "result", "details")
    for check in checks:
        table.add_row(check.name, "[green]passed[/]" if check.passed else "[red]FAILED[/]", check.detail)
    console.print(table)
    for check in checks:
        for d in check.differences:
            console.print(
                f"{check.name}: prompt {d.prompt}, token {d.index}: alone {d.alone}, with the drafter {d.drafted}; "
                f"logit margin {d.margin:.3g}: {d.verdict}"
            )
