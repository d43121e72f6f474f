"""What `litspec distill` is worth after a fine-tune: the embedded target learns the Python standard library's source.

    python scripts/bench_distill.py --old_text NOVELS --out_dir OUT          # all stages; some 30 minutes on two cores
    python scripts/bench_distill.py --old_text NOVELS --out_dir OUT --stage report

Stages, each of which goes on where it was ended:

    tune      fine-tunes the embedded target by cross-entropy until its perplexity on held-out modules has halved
    distill   trains the shipped draft for the tuned target, as a user would: prompts of both kinds, old ones mixed in
    report    generates held-out prompts with litspec and prints a table: tokens per round, speed, share recovered

Words: *stale* is the shipped draft with the tuned target; the *reference* is the shipped draft with the target that it
was made for, on that one's own text. Recovered is (distilled - stale) / (reference - stale).
"""

from __future__ import annotations

import json
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import CLI
from torch import Tensor
from train_demo_pair import FULL, perplexity, pieces_of, train_by_cross_entropy

from litspec import SpecLLM
from litspec.checkpoint import open_checkpoint
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.text import TextCodec
from litspec.training import distill
from litspec.training.draft_model import DraftModel
from litspec.training.target import FrozenTarget, load_gpt
from litspec.training.texts import write_lines

PROMPT_TOKENS = 32
NEW_TOKENS = 96
K = 4
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 50}
EVERY = 12  # each so many-th module of the library is held out
HELD_OUT_NOVEL = "persuasion.txt"
LEARNING_RATE = 1.5e-3  # of the fine-tune


# --- texts ---


def modules(*, held_out: bool) -> list[str]:
    """Sources of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for number, file in enumerate(files) if (number % EVERY == 0) == held_out]
    return [file.read_text(encoding="utf-8", errors="replace") for file in chosen]


def novels(folder: Path, *, held_out: bool) -> list[str]:
    """The texts that the embedded pair was trained on, or the one that was held out."""
    files = [file for file in sorted(folder.glob("*.txt")) if (file.name == HELD_OUT_NOVEL) == held_out]
    if not files:
        raise SystemExit(f"{str(folder)!r} has no {HELD_OUT_NOVEL if held_out else 'other .txt file'}.")
    return [file.read_text(encoding="utf-8") for file in files]


def stream(texts: list[str], codec: TextCodec) -> Tensor:
    """All texts one behind the other, (N,)."""
    return torch.cat([codec.tokenizer.encode(text, bos=False, eos=False).long() for text in texts])


# --- tune ---


def tune(out: Path, codec: TextCodec, steps: int) -> None:
    """Writes the tuned target to `out`."""
    if (out / "tuned.json").exists():
        return
    state = out.with_name("target.state")
    start = open_checkpoint(DEMO_TARGET)
    model = load_gpt(start, torch.float32, torch.device("cpu"))
    recipe = replace(FULL, target_steps=steps, learning_rate=LEARNING_RATE)
    train_by_cross_entropy(model, stream(modules(held_out=False), codec), state, recipe, seed=0)
    # The folder is written as a draft's is: config, tokenizer and weights.
    frozen = FrozenTarget(start, torch.float32, torch.device("cpu"))
    DraftModel(start.config, model.state_dict(), frozen, tokenizer_dir=start.dir, dtype=torch.bfloat16, k=K).save(out)
    text = "\n".join(modules(held_out=True))
    before, after = (perplexity(folder, text, 256) for folder in (DEMO_TARGET, out))
    figures = {"tune_steps": steps, "perplexity_before": before, "perplexity_after": after}
    (out / "tuned.json").write_text(json.dumps(figures))
    state.unlink(missing_ok=True)


# --- distill ---


def train(target: Path, out: Path, old_text: Path, codec: TextCodec, minutes: float, texts: int) -> dict[str, Any]:
    """One run of `distill` on prompts of both kinds: three quarters new, one quarter old. As many pieces again are
    given with the text that follows them, which costs the target no writing."""
    lines: list[dict[str, Any]] = []
    data = out.with_name("prompts.jsonl")
    for seed, (source, share) in enumerate(((modules(held_out=False), 3), (novels(old_text, held_out=False), 1))):
        count = texts * share // 4
        lines += [{"prompt": prompt} for prompt in pieces_of(source, codec, PROMPT_TOKENS, count, seed)]
        for piece in pieces_of(source, codec, PROMPT_TOKENS + NEW_TOKENS, 2 * count, seed + 10):
            lines.append({"prompt": piece[:8], "text": piece[8:]})
    print(f"{len(lines)} prompts and given texts", flush=True)
    write_lines(data, lines)
    return distill(
        data,
        out,
        checkpoint_dir=target,
        draft_dir=DEMO_DRAFT,
        texts=len(lines),
        max_new_tokens=NEW_TOKENS,
        minutes=minutes,
        held_out=0.12,
        measured_texts=128,
        accelerator="cpu",
        **SAMPLING,
    )


# --- report ---


def served(pairs: dict[str, SpecLLM], prompts: list[str], k: int | str) -> dict[str, dict[str, float]]:
    """Tokens per round and tokens per second of several pairs, which take turns on each prompt."""
    counts = {name: [0.0, 0.0, 0.0] for name in pairs}
    for index, prompt in enumerate(["warm up", *prompts]):
        for name, llm in pairs.items():
            stats = llm.generate(
                prompt, max_new_tokens=NEW_TOKENS, seed=1, index=index, speculative_k=k, **SAMPLING
            ).stats
            if index:
                found = (stats.new_tokens - 1, stats.rounds, stats.decode_seconds)
                counts[name] = [a + b for a, b in zip(counts[name], found)]
    return {
        name: {"tokens_per_round": tokens / rounds, "tokens_per_second": tokens / seconds}
        for name, (tokens, rounds, seconds) in counts.items()
    }


def report(
    target: Path, draft: Path, old_text: Path, codec: TextCodec, count: int, summary: dict[str, Any]
) -> dict[str, Any]:
    """All figures, on prompts from held-out modules and the held-out novel."""
    new = pieces_of(modules(held_out=True), codec, PROMPT_TOKENS, count, 2)
    old = pieces_of(novels(old_text, held_out=True), codec, PROMPT_TOKENS, count, 3)
    stale, distilled, original = (
        SpecLLM.load(t, d, accelerator="cpu")
        for t, d in ((target, DEMO_DRAFT), (target, draft), (DEMO_TARGET, DEMO_DRAFT))
    )
    pairs = {"stale": stale, "distilled": distilled}
    on_new, on_old = served(pairs, new, K), served(pairs, old, K)
    auto = served(pairs, new, "auto")
    reference = served({"reference": original}, old, K)["reference"]["tokens_per_round"]
    was, now = (on_new[name]["tokens_per_round"] for name in pairs)
    simulated, measured = summary["best"]["tokens_per_round"], summary["served"]["best"]["tokens_per_round"]
    return {
        **json.loads((target / "tuned.json").read_text()),
        "speculative_k": K,
        "prompts": count,
        "stale": was,
        "reference": reference,
        "distilled": now,
        "recovered": (now - was) / (reference - was),
        "old_text": {name: on_old[name]["tokens_per_round"] for name in pairs},
        "old_text_lost": 1 - on_old["distilled"]["tokens_per_round"] / on_old["stale"]["tokens_per_round"],
        "speed_ratio": on_new["distilled"]["tokens_per_second"] / on_new["stale"]["tokens_per_second"],
        "speed_ratio_auto_k": auto["distilled"]["tokens_per_second"] / auto["stale"]["tokens_per_second"],
        "simulated": simulated,
        "served_on_the_same_prompts": measured,
        "served_over_simulated": measured / simulated,
        "training_seconds": summary["seconds"],
        "steps": summary["steps"],
    }


def main(
    old_text: Path,
    out_dir: Path = Path("bench_distill"),
    *,
    stage: Literal["all", "tune", "distill", "report"] = "all",
    tune_steps: int = 800,
    minutes: float = 9.0,
    texts: int = 1200,
    prompts: int = 60,
) -> None:
    """Runs the stages and prints the figures as JSON.

    Args:
        old_text: Folder of the novels that the embedded pair was trained on, and of `persuasion.txt`, held out.
        out_dir: For the tuned target, the draft and the figures.
        stage: One of the stages, whose inputs are there, or all.
        tune_steps: Of the fine-tune.
        minutes: Of the draft's training; the target's writing comes on top.
        texts: Prompts that the tuned target answers.
        prompts: Held-out prompts of each kind.
    """
    torch.set_num_threads(1)
    out_dir.mkdir(parents=True, exist_ok=True)
    codec = TextCodec(DEMO_TARGET, open_checkpoint(DEMO_TARGET).config)
    target, draft = out_dir / "target", out_dir / "draft"
    if stage in ("all", "tune"):
        tune(target, codec, tune_steps)
        print((target / "tuned.json").read_text(), flush=True)
    if stage in ("all", "distill"):
        began = time.perf_counter()
        train(target, draft, old_text, codec, minutes, texts)
        print(f"distill took {time.perf_counter() - began:.0f} s in this call", flush=True)
    if stage in ("all", "report"):
        summary = json.loads((draft / "distill.json").read_text())
        figures = report(target, draft, old_text, codec, prompts, summary)
        (out_dir / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    CLI(main, as_positional=False)
