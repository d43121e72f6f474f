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

# Openings that any language model can go on from.
PROMPTS = (
    "It was a truth universally acknowledged, that",
    "She had never been so happy in her life, and yet",
    "The letter was short:",
    "Mr. Elliot bowed, and",
    "one two three one two three one two",
    "Dear Anne, I hope that you are well. I hope that",
)
# Contexts at which the drafter's reported distribution is tested, and draws at each.
CONTEXTS, DRAWS = 20, 4096
# Rounds played on table models to test the accept rule.
TABLE_DRAWS = 50_000


@dataclass
class Difference:
    """Where a drafter's text leaves the target's.

    Attributes:
        prompt: Index of the prompt.
        index: Index of the first token that differs.
        alone: The target's token without a drafter, None past its end.
        drafted: The token with one, None past its end.
        margin: By how much the target's logits (with the sampler's noise) prefer the former.
        verdict: "rounding tie" where the margin is below the precision's resolution, else "fault".
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
    """Prove on your own pair that speculation changes the speed, never the text.

    Every prompt is decoded by the target alone and with every drafter at hand, greedy and with the coupled sampler; the
    tokens must be equal. The rejection sampler keeps the target's distribution instead: its accept rule is tested on
    table models, and the drafter's reported distribution against what it draws. Exits 0 where all is well, else 1.

    Args:
        {load}
        prompts_file: Text file with a prompt on each line; by default a few are built in.
        {settings}
        quick: The first two prompts and at most 32 new tokens: sooner, and less of a proof.
        output_format: text prints a table, json one object.
    """
    from litspec.errors import InputError

    verify_width, seed = load.verify_width, settings.seed
    assert seed is not None, "a flag gives a number"
    if verify_width < 2:
        raise InputError(f"verify_width must be at least 2, or there is nothing to verify, got {verify_width}")
    prompts = read_prompts(prompts_file)
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
    steps = len(prompts) * len(modes) * (len(drafters) + 1) + CONTEXTS + 1
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
        checks += _rejection_checks(llm, drafters[0], prompts, sampled, seed, verify_width - 1, advance)
    if not quiet:
        _print(checks, llm.runner.rows(llm.placed.rows), output_format)
    return 0 if all(check.passed for check in checks) else 1


def read_prompts(prompts_file: str | None) -> list[str]:
    """A prompt from each line of a file that holds any; without a file the built-in ones."""
    from litspec.errors import InputError

    if prompts_file is None:
        return list(PROMPTS)
    try:
        lines = Path(prompts_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts_file {prompts_file!r} cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"prompts_file {prompts_file!r} holds no prompt; write one on each line.")
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
    """Equal tokens pass; so does nothing else."""
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
    """Finds the first token that differs and asks the target how sure it was there."""
    import torch

    from litspec.engine.target import TargetSession
    from litspec.llm import text_seed
    from litspec.noise import gumbel_noise, position_keys
    from litspec.sampling import Sampling

    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    x, y = (ids[at] if at < len(ids) else None for ids in (a, b))
    if x is None or y is None:
        # One text stopped where the other went on: the stop is not among the tokens, so there is no margin to name.
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
    llm: Any, drafter: str, prompts: list[str], sampled: dict[str, Any], seed: int, k: int, advance: Any
) -> list[Check]:
    """The accept rule on table models; the drafter's honesty on the real pair."""
    from litspec.sampling import Sampling
    from litspec.testing import P_VALUE, accept_rule_test, honesty

    rule = accept_rule_test(draws=TABLE_DRAWS, seed=seed)
    advance()
    detail = f"{TABLE_DRAWS:,} draws on table models, G-test p = {rule.p_value:.3g} (fails below {P_VALUE:.0e})"
    checks = [Check("rejection, accept rule", rule.p_value >= P_VALUE, detail, [])]
    if Sampling(**sampled).greedy:
        return checks
    # Contexts along texts that the target wrote, where drafting happens.
    settings = dict(max_new_tokens=24, seed=seed, speculative_k=k, **sampled)
    texts = [llm.generate(prompt, index=i, **settings) for i, prompt in enumerate(prompts)]
    ids = [llm.codec.encode(p).tolist() + text.token_ids for p, text in zip(prompts, texts)]
    contexts = [ids[i % len(ids)][: max(2, len(ids[i % len(ids)]) - i)] for i in range(CONTEXTS)]
    tests = honesty(
        llm.with_drafter(drafter).drafter,
        llm,
        contexts,
        sampling=Sampling(**sampled),
        draws=DRAWS,
        seed=seed,
        progress=advance,
    )
    worst = min((test.p_value for test in tests), default=1.0)
    # Bonferroni: all tests together fail an honest drafter as rarely as one of them alone would.
    threshold = P_VALUE / max(1, len(tests))
    detail = (
        f"{len(tests)} contexts x {DRAWS} draws against the reported q, worst G-test p = {worst:.3g} "
        f"(fails below {threshold:.0e}, which is {P_VALUE:.0e} / {len(tests)} tests)"
    )
    if not tests:
        detail = "it reports no distribution, so there is none to be false"
    checks.append(Check(f"rejection, honesty of {drafter}", worst >= threshold, detail, []))
    return checks


def _print(checks: list[Check], rows: tuple[int, ...], output_format: str) -> None:
    if output_format == "json":
        passed = all(check.passed for check in checks)
        print(json.dumps({"passed": passed, "rows": rows, "checks": [asdict(check) for check in checks]}))
        return
    from rich.console import Console
    from rich.table import Table

    # Wide enough when it goes to a file, where rich would otherwise fold at 80 columns.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    found = ", ".join(map(str, rows))
    console.print(f"Rows of a verification that have equal bits here (a round runs one of these): {found}.")
    table = Table("check", "result", "seen")
    for check in checks:
        table.add_row(check.name, "[green]passed[/]" if check.passed else "[red]FAILED[/]", check.detail)
    console.print(table)
    for check in checks:
        for d in check.differences:
            console.print(
                f"{check.name}: prompt {d.prompt}, token {d.index}: alone {d.alone}, with the drafter {d.drafted}; "
                f"logit margin {d.margin:.3g}: {d.verdict}"
            )
