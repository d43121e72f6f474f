"""Trains a target and its draft model from a folder of text files, small enough for a CPU, as LitGPT checkpoints.

    python scripts/train_demo_pair.py --data_dir FOLDER --out_dir OUT

A byte-level BPE tokenizer, the target by cross-entropy, and the draft by `litspec.training.distill`: half on texts that
the target writes, half on the training text. The holdout file is never trained on. A run that was ended goes on;
`--evaluate true` measures an existing pair on the holdout file and trains nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import litgpt.model
import torch
import torch.nn.functional as F
from jsonargparse import CLI
from litgpt.config import Config
from litgpt.prompts import Default, save_prompt_style
from litgpt.utils import save_config
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from litspec import SpecLLM
from litspec.checkpoint import WEIGHTS, open_checkpoint
from litspec.demo import DEMO_TARGET
from litspec.text import TextCodec
from litspec.training import distill
from litspec.training.draft_model import initialize
from litspec.training.files import save_atomically
from litspec.training.target import load_gpt
from litspec.training.texts import cut, write_lines

EOS = "<|endoftext|>"
SAVE_EVERY = 50


@dataclass(frozen=True)
class Recipe:
    """What decides the result. Steps count optimizer updates; windows and lengths count tokens."""

    vocab_size: int = 2048
    block_size: int = 1024
    # Deep and narrow: a target step then costs many small operations, a draft step few, whatever their widths.
    target: tuple[int, int, int, int, int] = (16, 192, 6, 2, 256)  # layers, width, heads, query groups, MLP width
    draft: tuple[int, int, int, int, int] = (1, 192, 6, 2, 512)
    target_steps: int = 1800
    draft_steps: int = 9000
    batch: int = 8
    learning_rate: float = 3e-3
    window: int = 256
    # Every `long_every`-th batch holds the same number of tokens in windows of block_size, so that attention over
    # distances beyond `window` is learnt too and longer texts do not fall apart.
    long_every: int = 4
    own_texts: int = 8192  # texts written by the target for the draft to learn from, and as many pieces of the novels
    prompt: int = 32
    new_tokens: int = 128


FULL = Recipe()
FAST = Recipe(
    vocab_size=512,
    block_size=256,
    target=(2, 64, 2, 1, 96),
    draft=(1, 32, 1, 1, 64),
    target_steps=24,
    draft_steps=24,
    batch=4,
    window=64,
    own_texts=16,
    prompt=8,
    new_tokens=24,
)


def read_texts(data_dir: Path, holdout: str) -> tuple[list[str], str]:
    """Returns the training texts, in the order of their file names, and the held-out text.

    Raises:
        SystemExit: if the folder lacks the holdout file or holds no other .txt file.
    """
    files = sorted(data_dir.glob("*.txt"))
    if data_dir / holdout not in files:
        raise SystemExit(f"--holdout {holdout!r} is not in {str(data_dir)!r}; name one of its .txt files.")
    if len(files) < 2:
        raise SystemExit(f"{str(data_dir)!r} holds only the holdout file; add at least one .txt file to train on.")
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    held_out = texts.pop(holdout)
    return list(texts.values()), held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text round-trips, since all 256 bytes are entries of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config(name: str, shape: tuple[int, int, int, int, int], vocab_size: int, block_size: int) -> Config:
    """A Llama in LitGPT's terms. `shape`: layers, width, heads, query groups, width of the MLP."""
    names = ("n_layer", "n_embd", "n_head", "n_query_groups", "intermediate_size")
    return Config(
        name=name,
        block_size=block_size,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        **dict(zip(names, shape)),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


def write_folder(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Writes all of a checkpoint folder but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    save_prompt_style(Default(), folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.block_size,
    }
    generation_config = {"eos_token_id": tokenizer.token_to_id(EOS)}
    for name, content in (("tokenizer_config", tokenizer_config), ("generation_config", generation_config)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train_by_cross_entropy(
    model: litgpt.model.GPT, tokens: Tensor, state_file: Path, recipe: Recipe, *, seed: int, floor: float = 0.02
) -> None:
    """Trains a language model on a stream of tokens `(N,)`; the state is saved now and then, and gone on from.

    A step's windows depend on seed and step alone. AdamW, linear warm-up, cosine down to a share `floor`.

    Raises:
        SystemExit: The text is too short for a window.
    """
    steps = recipe.target_steps
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    begin = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in track(range(begin, steps), description="target", total=steps, completed=begin):
        length = recipe.block_size if step % recipe.long_every == recipe.long_every - 1 else recipe.window
        if len(tokens) <= length + 1:
            raise SystemExit(f"{len(tokens)} tokens to train on are too few for windows of {length}; add text.")
        generator = torch.Generator().manual_seed(seed + step)
        rows = max(1, recipe.batch * recipe.window // length)
        starts = torch.randint(len(tokens) - length - 1, (rows, 1), generator=generator)
        batch = tokens[starts + torch.arange(length + 1)]
        cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * cosine * min(1.0, (step + 1) / min(100, steps // 10 + 1))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            save_atomically(content, state_file)


def pieces_of(texts: list[str], codec: TextCodec, size: int, count: int, seed: int) -> list[str]:
    """At most `count` different pieces of about `size` tokens, from all over the texts."""
    pieces = sorted({piece for text in texts for piece in cut(text, codec, size)})
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    return [pieces[i] for i in order[:count].tolist()]


@torch.no_grad()
def perplexity(folder: Path, text: str, window: int) -> float:
    """Of a checkpoint, per token, over windows side by side."""
    model = load_gpt(open_checkpoint(folder), torch.float32, torch.device("cpu"))
    tokens = TextCodec(folder, model.config).tokenizer.encode(text, bos=False, eos=False).long()
    count = min((len(tokens) - 1) // window, 128)
    idx, labels = (tokens[shift : count * window + shift].view(count, window) for shift in (0, 1))
    losses = [
        F.cross_entropy(model(rows).flatten(0, 1), label.flatten(), reduction="none")
        for rows, label in zip(idx.split(8), labels.split(8))
    ]
    return math.exp(float(torch.cat(losses).mean()))


def measure(target: Path, draft: Path, held_out: str, *, prompts: int, seed: int) -> dict[str, Any]:
    """Acceptance at k = 4, greedy over 24 tokens and at 0.8 over 100, on prompts of 64 tokens evenly spread over the
    held-out text; and the target's perplexity there."""
    llm = SpecLLM.load(target, draft, accelerator="cpu")
    pieces = list(cut(held_out, llm.codec, 64))
    chosen = pieces[:: max(1, len(pieces) // prompts)][:prompts]
    figures: dict[str, Any] = {"prompts": len(chosen), "perplexity": perplexity(target, held_out, 64)}
    for name, new_tokens, temperature in (("greedy", 24, 0.0), ("0.8", 100, 0.8)):
        texts = llm.generate(chosen, max_new_tokens=new_tokens, temperature=temperature, seed=seed, speculative_k=4)
        rounds = [text.stats for text in texts if text.stats.proposed]
        figures[f"acceptance_{name}"] = sum(s.accepted for s in rounds) / sum(s.proposed for s in rounds)
        figures[f"tokens_per_round_{name}"] = statistics.mean(s.tokens_per_round for s in rounds)
    return figures


def main(
    data_dir: Path,
    out_dir: Path = Path("demo_pair"),
    *,
    holdout: str = "persuasion.txt",
    target_steps: int | None = None,
    draft_steps: int | None = None,
    seed: int = 1234,
    fast: bool = False,
    evaluate: bool = False,
    prompts: int = 20,
) -> None:
    """Trains a target and its draft on a folder of texts and writes `out_dir/target` and `out_dir/draft`.

    Args:
        data_dir: Folder of UTF-8 `.txt` files.
        out_dir: Where the two checkpoint folders go.
        holdout: The file of `data_dir` that is kept out of training and measured on.
        target_steps: Optimizer steps for the target; the recipe's own number by default.
        draft_steps: Optimizer steps for the draft; the recipe's own number by default.
        seed: Same seed, machine and settings: same weights.
        fast: Tiny models and a few steps, to see that everything runs. The text will be noise.
        evaluate: Train nothing, measure the pair in `out_dir` and print the figures as JSON.
        prompts: How many held-out prompts to measure on. Acceptance varies from prompt to prompt: on 20 of them the
            greedy figure is good to about 0.04, on 200 to about 0.01.
    """
    texts, held_out = read_texts(data_dir, holdout)
    target, draft = out_dir / "target", out_dir / "draft"
    if evaluate:
        print(json.dumps(measure(target, draft, held_out, prompts=prompts, seed=seed), indent=2))
        return
    # Another pair is named for its folder.
    pair = "litspec-demo" if out_dir.resolve() == DEMO_TARGET.parent.resolve() else out_dir.resolve().name
    recipe = FAST if fast else FULL
    recipe = replace(
        recipe,
        target_steps=recipe.target_steps if target_steps is None else target_steps,
        draft_steps=recipe.draft_steps if draft_steps is None else draft_steps,
    )
    if not (target / WEIGHTS).exists():
        tokenizer = train_tokenizer(texts, recipe.vocab_size)
        config = model_config(f"{pair}-target", recipe.target, tokenizer.get_vocab_size(), recipe.block_size)
        write_folder(target, config, tokenizer)
        eos = tokenizer.token_to_id(EOS)
        tokens = torch.tensor([id_ for text in texts for id_ in (*tokenizer.encode(text).ids, eos)])
        torch.manual_seed(seed)
        model = litgpt.model.GPT(config)
        initialize(model)
        train_by_cross_entropy(model, tokens, out_dir / "target.state", recipe, seed=seed)
        save_atomically({name: w.bfloat16() for name, w in model.state_dict().items()}, target / WEIGHTS)
        (out_dir / "target.state").unlink(missing_ok=True)
    checkpoint = open_checkpoint(target)
    codec = TextCodec(target, checkpoint.config)
    vocab_size = checkpoint.config.vocab_size
    save_config(model_config(f"{pair}-draft", recipe.draft, vocab_size, recipe.block_size), out_dir)
    own = pieces_of(texts, codec, recipe.prompt, recipe.own_texts, seed)
    given = pieces_of(texts, codec, recipe.prompt + recipe.new_tokens, recipe.own_texts, seed + 1)
    lines = [{"prompt": piece} for piece in own]
    # Of the novels' own text all but a few characters counts as an answer.
    lines += [{"prompt": piece[:8], "text": piece[8:]} for piece in given if piece[:8].strip()]
    distill(
        write_lines(out_dir / "prompts.jsonl", lines),
        draft,
        checkpoint_dir=target,
        draft_config=str(out_dir / "model_config.yaml"),
        steps=recipe.draft_steps,
        texts=len(lines),
        max_new_tokens=recipe.new_tokens,
        held_out=0.02 if not fast else 0.2,
        temperature=0.8,
        top_k=None,
        seed=seed,
        accelerator="cpu",
        training_precision="bf16-mixed",
    )


if __name__ == "__main__":
    CLI(main, as_positional=False)
