"""Trains a target and its draft model from a folder of text files, small enough for a CPU, as LitGPT checkpoints.

    python scripts/train_demo_pair.py --data_dir FOLDER --out_dir OUT

Three steps, each seeded:

1. a byte-level BPE tokenizer over the training files;
2. the target, deep and narrow, by cross-entropy;
3. the draft, one layer, by distillation: on windows of the training text and on text that the target itself wrote,
   because in use it is the target's text that a draft has to foresee (Zhou et al. 2023, "DistillSpec", arXiv
   2310.08461). The loss moves from the KL divergence, which learns fast, to the total variation: 1 - TV(p, q) is
   exactly the probability that speculative sampling accepts a draft token (Leviathan et al. 2023, arXiv 2211.17192).

The holdout file is never trained on. `--evaluate true` measures an existing pair on it and trains nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse import CLI
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.prompts import Default, save_prompt_style
from litgpt.utils import save_config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

EOS = "<|endoftext|>"
ARGMAX_WEIGHT = 0.2  # in the draft's loss, for greedy decoding: there only the first choice counts
console = Console(stderr=True)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out. Steps count optimizer updates; windows and lengths count tokens."""

    vocab_size: int = 2048
    block_size: int = 1024
    # Deep and narrow: a target step then costs many small operations, a draft step few, whatever their widths.
    target: tuple[int, int, int, int, int] = (16, 192, 6, 2, 256)  # layers, width, heads, query groups, MLP width
    draft: tuple[int, int, int, int, int] = (1, 192, 6, 2, 512)
    target_steps: int = 1800
    target_batch: int = 8
    target_lr: float = 3e-3
    draft_steps: int = 9000
    draft_batch: int = 16
    draft_lr: float = 3e-3
    window: int = 256
    # Every `long_every`-th batch holds the same number of tokens in windows of block_size, so that attention over
    # distances beyond `window` is learnt too and longer texts do not fall apart.
    long_every: int = 4
    kept_tokens: int = 1 << 20  # at most so many of the training text's are kept with the target's states over them
    own_texts: int = 8192  # texts written by the target for the draft to learn from
    own_batch: int = 512
    own_prompt: int = 32
    own_length: int = 160
    own_greedy: int = 64  # so many of a greedy text's tokens are greedy: later ones tend to loop
    temperature: float = 0.8


FULL = Recipe()
FAST = Recipe(
    vocab_size=512,
    block_size=256,
    target=(2, 64, 2, 1, 96),
    draft=(1, 32, 1, 1, 64),
    target_steps=24,
    target_batch=4,
    draft_steps=24,
    draft_batch=4,
    window=64,
    kept_tokens=8192,
    own_texts=16,
    own_batch=16,
    own_prompt=8,
    own_length=64,
)


# --- data -----------------------------------------------------------------------------------------


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
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one stream of ids, shape `(N,)`, an EOS after each. Checks that each decodes to itself."""
    eos, ids = tokenizer.token_to_id(EOS), []
    for text in texts:
        encoded = tokenizer.encode(text).ids
        if tokenizer.decode(encoded, skip_special_tokens=False) != text:
            raise RuntimeError(f"the tokenizer does not give back the text that begins {text[:40]!r}")
        ids += [*encoded, eos]
    return torch.tensor(ids)


def windows(tokens: Tensor, length: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields `(batch, length)` pieces of the stream for ever: each epoch cuts at other places and shuffles."""
    count = (len(tokens) - length) // length
    if count < batch:
        raise SystemExit(f"{len(tokens)} tokens to train on are too few for batches of {batch} x {length}; add text.")
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        order = torch.randperm(count, generator=generator)
        for rows in order[: count - count % batch].view(-1, batch):
            starts = rows * length + shift
            yield tokens[starts.unsqueeze(1) + torch.arange(length)]


# --- models ---------------------------------------------------------------------------------------


def model_config(role: str, shape: tuple[int, int, int, int, int], vocab_size: int, block_size: int) -> Config:
    """A Llama in LitGPT's terms. `shape`: layers, width, heads, query groups, width of the MLP."""
    n_layer, n_embd, n_head, n_query_groups, intermediate_size = shape
    return Config(
        name=f"litspec-demo-{role}",
        block_size=block_size,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_query_groups=n_query_groups,
        intermediate_size=intermediate_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


def new_model(config: Config) -> GPT:
    """A GPT with small random weights; what is added to the residual stream starts smaller the deeper the model is."""
    model = GPT(config)
    model.apply(model._init_weights)
    for block in model.transformer.h:
        for projection in (block.attn.proj, block.mlp.proj):
            torch.nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * config.n_layer))
    return model


def save_checkpoint(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Writes the folder as `litgpt` has its checkpoints; the weights as a plain bf16 state dict."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(model.config, folder)
    save_prompt_style(Default(), folder)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).clone() for name, tensor in model.state_dict().items()}
    torch.save(weights, folder / "lit_model.pth")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.block_size,
    }
    generation_config = {"eos_token_id": tokenizer.token_to_id(EOS)}
    for name, content in (("tokenizer_config", tokenizer_config), ("generation_config", generation_config)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> GPT:
    """The folder's model for inference, its weights as they were saved, in `dtype`."""
    model = GPT(Config.from_file(folder / "model_config.yaml"))
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True))
    return model.to(device, dtype).eval().requires_grad_(False)


def hidden_states(model: GPT, idx: Tensor) -> Tensor:
    """The states that `lm_head` reads, shape `(B, T, n_embd)`: some ten times smaller to keep than the logits."""
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    try:
        return model(idx)
    finally:
        model.lm_head = head


# --- training -------------------------------------------------------------------------------------


def optimize(
    fabric: Fabric,
    model: GPT,
    loss_of: Callable[[torch.nn.Module, int], Tensor],
    *,
    steps: int,
    lr: float,
    name: str,
    compile: bool,
    every: int = 0,
    report: Callable[[int], str] | None = None,
) -> None:
    """AdamW, linear warm-up, cosine by step. `loss_of(model, step)` draws the step's batch and returns its loss."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    wrapped, optimizer = fabric.setup(torch.compile(model, dynamic=False) if compile else model, optimizer)
    warm_up = min(100, steps // 10 + 1)
    start, mean = time.perf_counter(), 0.0
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss="")
        for step in range(steps):
            cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * cosine * min(1.0, (step + 1) / warm_up)
            loss = loss_of(wrapped, step)
            fabric.backward(loss)
            fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
            bar.update(task, advance=1, loss=f"loss {mean:.3f}")
            if every and (step + 1) % every == 0:
                seconds = time.perf_counter() - start
                extra = "" if report is None else report(step + 1)
                console.print(
                    f"{name} step {step + 1}/{steps}, {seconds:.0f} s, loss {mean:.4f} {extra}", highlight=False
                )


def train_target(fabric: Fabric, model: GPT, tokens: Tensor, recipe: Recipe, *, seed: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = recipe.block_size
    short = windows(tokens, recipe.window + 1, recipe.target_batch, generator)
    long = windows(tokens, length + 1, max(1, recipe.target_batch * recipe.window // length), generator)

    def loss_of(module: torch.nn.Module, step: int) -> Tensor:
        batch = next(long if step % recipe.long_every == recipe.long_every - 1 else short).to(fabric.device)
        logits = module(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    optimize(fabric, model, loss_of, steps=recipe.target_steps, lr=recipe.target_lr, name="target", **options)


@torch.no_grad()
def own_texts(target: GPT, tokens: Tensor, recipe: Recipe, *, seed: int) -> Tensor:
    """What the target writes after pieces of the training text, shape `(own_texts, own_length)`, prompts included.

    A third of the rows is greedy for its first `own_greedy` tokens, all else is sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(target.parameters()).device
    prompts = windows(tokens, recipe.own_prompt, recipe.own_batch, generator)
    batches, greedy = [], torch.arange(recipe.own_batch, device=device).unsqueeze(1) % 3 == 0
    rounds = math.ceil(recipe.own_texts / recipe.own_batch)
    target.max_seq_length = recipe.own_length
    target.set_kv_cache(recipe.own_batch, device=device, dtype=next(target.parameters()).dtype)
    with Progress(TextColumn("the target writes"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=rounds * (recipe.own_length - recipe.own_prompt))
        for _ in range(rounds):
            text = fed = next(prompts).to(device)
            while text.size(1) < recipe.own_length:
                positions = torch.arange(text.size(1) - fed.size(1), text.size(1), device=device)
                logits = target(fed, positions, input_pos_maxp1=text.size(1))[:, -1].float()
                # argmax(logits + T * Gumbel noise) is one draw from softmax(logits / T), and the argmax at T = 0.
                noise = torch.empty(logits.shape).exponential_(generator=generator).to(device).log().neg()
                plain = greedy & (text.size(1) < recipe.own_prompt + recipe.own_greedy)
                fed = (logits + noise * recipe.temperature * ~plain).argmax(dim=1, keepdim=True)
                text = torch.cat((text, fed), dim=1)
                bar.advance(task)
            batches.append(text.cpu())
    target.clear_kv_cache()
    target.max_seq_length = target.config.block_size
    return torch.cat(batches)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float, share: Tensor) -> Tensor:
    """`(1 - share) * KL(p || q) + share * TV(p, q)` at `temperature`, plus cross-entropy on the target's argmax.

    Args:
        logits: The draft's, shape `(N, V)`.
        teacher_logits: The target's, shape `(N, V)`.
        temperature: Applied to both.
        share: Scalar in [0, 1]; a tensor, so that a compiled graph serves all of its values.
    """
    log_p = F.log_softmax(teacher_logits.float() / temperature, dim=-1)
    log_q = F.log_softmax(logits.float() / temperature, dim=-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    variation = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    best = F.nll_loss(log_q, log_p.argmax(-1))
    return (1 - share) * divergence + share * variation + ARGMAX_WEIGHT * best


def train_draft(
    fabric: Fabric, model: GPT, target: GPT, tokens: Tensor, recipe: Recipe, *, seed: int, compile: bool, **options: Any
) -> None:
    """Distils `target` into `model`: half of the batches are the target's own text, half are training windows."""
    generator = torch.Generator().manual_seed(seed)
    per_batch = recipe.draft_batch * recipe.window
    kept = recipe.kept_tokens // recipe.window
    short = windows(tokens, recipe.window, min(kept, len(tokens) // recipe.window - 1), generator)
    kept = max(1, recipe.kept_tokens // recipe.long_every // recipe.block_size)
    long = windows(tokens, recipe.block_size, min(kept, len(tokens) // recipe.block_size - 1), generator)
    texts = own_texts(target, tokens, recipe, seed=seed), next(short), next(long)
    # The target no longer changes: what its head reads is computed once, each step then runs only the head.
    with torch.no_grad():
        states = [
            torch.cat([hidden_states(target, part.to(fabric.device)) for part in rows.split(16)]) for rows in texts
        ]

    def batches(rows: Tensor) -> Iterator[Tensor]:
        size = min(len(rows), max(1, per_batch // rows.size(1)))
        while True:
            yield from torch.randperm(len(rows), generator=generator)[: len(rows) - len(rows) % size].view(-1, size)

    chosen = [batches(rows) for rows in texts]
    loss_function = torch.compile(distillation_loss, dynamic=False) if compile else distillation_loss

    def loss_of(module: torch.nn.Module, step: int) -> Tensor:
        share = min(1.0, max(0.0, 2 * step / recipe.draft_steps - 0.5))
        kind = 0 if step % 2 == 0 else 2 if step // 2 % recipe.long_every == recipe.long_every - 1 else 1
        rows = next(chosen[kind])
        with torch.no_grad():
            teacher_logits = target.lm_head(states[kind][rows]).flatten(0, 1)
        logits = module(texts[kind][rows].to(fabric.device)).flatten(0, 1)
        return loss_function(logits, teacher_logits, recipe.temperature, torch.tensor(share, device=fabric.device))

    optimize(
        fabric, model, loss_of, steps=recipe.draft_steps, lr=recipe.draft_lr, name="draft", compile=compile, **options
    )


# --- measuring ------------------------------------------------------------------------------------


@torch.no_grad()
def token_losses(model: GPT, tokens: Tensor, length: int) -> Tensor:
    """Negative log-likelihoods in nats, shape `(windows, length)`, of windows side by side, none seeing another."""
    device = next(model.parameters()).device
    count = (len(tokens) - 1) // length
    inputs, labels = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    losses = []
    for idx, label in zip(inputs.split(8), labels.split(8)):
        logits = model(idx.to(device)).float().transpose(1, 2)
        losses.append(F.cross_entropy(logits, label.to(device), reduction="none").cpu())
    return torch.cat(losses)


class Text:
    """One text and a model's KV cache over it: `logits_after(ids)` feeds what of `ids` the cache lacks."""

    def __init__(self, model: GPT, max_length: int) -> None:
        self.model, self.fed = model, 0
        model.set_kv_cache(1, max_length, device=model.cos.device, dtype=model.lm_head.weight.dtype)
        model.max_seq_length = max_length

    def logits_after(self, ids: list[int]) -> Tensor:
        """Logits after each newly fed id, shape `(new, V)`, float32."""
        positions = torch.arange(self.fed, len(ids), device=self.model.cos.device)
        idx = torch.tensor([ids[self.fed :]], device=self.model.cos.device)
        self.fed = len(ids)
        return self.model(idx, positions, input_pos_maxp1=len(ids))[0].float()

    def forget(self, length: int) -> None:
        self.fed = min(self.fed, length)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) over the last dimension; at T = 0 all weight on the argmax."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)


@torch.no_grad()
def speculate(
    target: GPT,
    draft: GPT,
    prompt: list[int],
    new_tokens: int,
    *,
    k: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Speculative sampling, plainly written (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Returns:
        The text, prompt included, and for each round how many tokens were proposed and how many accepted.
    """
    ids, rounds = list(prompt), []
    end = len(prompt) + new_tokens
    verifier, drafter = Text(target, end), Text(draft, end)

    def draw(weights: Tensor) -> int:
        return int(torch.multinomial(weights.cpu(), 1, generator=generator))

    ids.append(draw(distribution(verifier.logits_after(ids)[-1], temperature)))
    while len(ids) < end:
        proposals, q = [], []
        for _ in range(min(k, end - len(ids) - 1)):
            q.append(distribution(drafter.logits_after([*ids, *proposals])[-1], temperature))
            proposals.append(draw(q[-1]))
        p = distribution(verifier.logits_after([*ids, *proposals]), temperature)
        accepted = 0
        while accepted < len(proposals):
            token = proposals[accepted]
            if float(torch.rand(1, generator=generator)) * q[accepted][token] >= p[accepted, token]:
                break
            accepted += 1
        left = p[accepted]
        if accepted < len(proposals):
            left = (p[accepted] - q[accepted]).clamp(min=0)
            left = left if left.sum() > 0 else p[accepted]
        rounds.append((len(proposals), accepted))
        ids += [*proposals[:accepted], draw(left)]
        # The last id is not fed yet; what was fed behind it was refused.
        verifier.forget(len(ids) - 1)
        drafter.forget(len(ids) - 1)
    return ids, rounds


@torch.no_grad()
def step_milliseconds(models: list[GPT], context: int = 128, repeats: int = 200) -> list[float]:
    """Median time of one step of one token after `context` others, in ms; the models take turns, so that both see the
    same load of the machine."""
    seconds: list[list[float]] = [[] for _ in models]
    texts = [Text(model, context + 1) for model in models]
    for text in texts:
        text.logits_after([0] * context)
    for turn in range(repeats + 10):
        for text, series in zip(texts, seconds):
            start = time.perf_counter()
            text.logits_after([0] * (context + 1))
            if text.model.cos.is_cuda:
                torch.cuda.synchronize()
            if turn >= 10:
                series.append(time.perf_counter() - start)
            text.forget(context)
    return [1000 * statistics.median(series) for series in seconds]


def distinct(ids: list[int], n: int = 4) -> float:
    """Share of the text's n-grams that are different ones; 1.0 where nothing repeats."""
    grams = list(zip(*(ids[i:] for i in range(n))))
    return len(set(grams)) / max(1, len(grams))


def measure(
    target_dir: Path,
    draft_dir: Path,
    held_out: str,
    *,
    prompts: int = 20,
    prompt_tokens: int = 64,
    new_tokens: int = 100,
    k: int = 4,
    temperature: float = 0.8,
    seed: int = 1234,
    samples: int = 3,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Measures the pair in float32 on the held-out text: prompts evenly spread over it, one sample each.

    Returns:
        A dict for JSON: acceptance rates (accepted over proposed; greedy counted up to the 24th token), perplexities,
        the step costs in ms, bytes of both folders, and the first `samples` texts.
    """
    tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    target, draft = (load_model(folder, torch.float32, device) for folder in (target_dir, draft_dir))
    tokens = encode_texts(tokenizer, [held_out])
    losses = token_losses(target, tokens, target.config.block_size)
    stride = (len(tokens) - prompt_tokens) // prompts
    generator = torch.Generator().manual_seed(seed)
    greedy_proposed = greedy_accepted = proposed = accepted = all_rounds = 0
    distincts, texts = [], []
    for number in range(prompts):
        prompt = tokens[number * stride : number * stride + prompt_tokens].tolist()
        _, rounds = speculate(target, draft, prompt, 24, k=k, temperature=0, generator=generator)
        greedy_proposed += sum(n for n, _ in rounds)
        greedy_accepted += sum(n for _, n in rounds)
        ids, rounds = speculate(target, draft, prompt, new_tokens, k=k, temperature=temperature, generator=generator)
        proposed += sum(n for n, _ in rounds)
        accepted += sum(n for _, n in rounds)
        all_rounds += len(rounds)
        distincts.append(distinct(ids[prompt_tokens:]))
        if number < samples:
            pieces = ids[:prompt_tokens], ids[prompt_tokens:]
            texts.append(dict(zip(("prompt", "continuation"), (tokenizer.decode(piece) for piece in pieces))))
    target_ms, draft_ms = step_milliseconds([target, draft])
    quarter = target.config.block_size // 4
    return {
        "prompts": prompts,
        "acceptance_greedy_24": greedy_accepted / greedy_proposed,
        f"acceptance_{temperature}": accepted / proposed,
        f"tokens_per_round_{temperature}": (accepted + all_rounds) / all_rounds,
        f"distinct_4grams_{temperature}": statistics.mean(distincts),
        "perplexity_per_token": losses.mean().exp().item(),
        "perplexity_per_byte": (losses.mean() * len(tokens) / len(held_out.encode())).exp().item(),
        # Rising figures here would mean that the target loses the thread in longer texts.
        "perplexity_by_quarter_of_the_context": [part.mean().exp().item() for part in losses.split(quarter, dim=1)],
        "target_step_ms": target_ms,
        "draft_step_ms": draft_ms,
        "step_cost_ratio": target_ms / draft_ms,
        "parameters": {
            name: sum(p.numel() for p in m.parameters()) for name, m in (("target", target), ("draft", draft))
        },
        "bytes": sum(file.stat().st_size for folder in (target_dir, draft_dir) for file in folder.iterdir()),
        "samples": texts,
    }


# --- command --------------------------------------------------------------------------------------


def main(
    data_dir: Path,
    out_dir: Path = Path("demo_pair"),
    *,
    holdout: str = "persuasion.txt",
    target_steps: int | None = None,
    draft_steps: int | None = None,
    seed: int = 1234,
    fast: bool = False,
    reuse_target: bool = False,
    evaluate: bool = False,
    prompts: int = 20,
    compile: bool = False,
    accelerator: str = "auto",
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
        reuse_target: Keep the target and tokenizer that are in `out_dir` and train only the draft.
        evaluate: Train nothing, measure the pair in `out_dir` and print the figures as JSON.
        prompts: How many held-out prompts to measure on. Acceptance varies from prompt to prompt: on 20 of them the
            greedy figure is good to about 0.04, on 200 to about 0.01.
        compile: Use `torch.compile`; on a CPU it needs a C++ compiler and saves about a quarter of the time.
        accelerator: Lightning Fabric's: auto, cpu or gpu. Precision is bf16-mixed on both.
    """
    recipe = FAST if fast else FULL
    recipe = replace(
        recipe,
        target_steps=recipe.target_steps if target_steps is None else target_steps,
        draft_steps=recipe.draft_steps if draft_steps is None else draft_steps,
    )
    texts, held_out = read_texts(data_dir, holdout)
    target_dir, draft_dir = out_dir / "target", out_dir / "draft"
    if evaluate:
        figures = measure(target_dir, draft_dir, held_out, prompts=prompts, seed=seed)
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        return
    start = time.perf_counter()
    fabric = Fabric(accelerator=accelerator, devices=1, precision="bf16-mixed")
    fabric.seed_everything(seed, verbose=False)
    every = 200 if not fast else 12

    if reuse_target:
        tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts, recipe.vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    tokens, held_out_tokens = encode_texts(tokenizer, texts), encode_texts(tokenizer, [held_out])
    console.print(f"{len(texts)} texts, {len(tokens)} tokens, {vocab_size} entries in the tokenizer")
    console.print(f"held out: {holdout}, {len(held_out_tokens)} tokens")
    if not reuse_target:
        model = new_model(model_config("target", recipe.target, vocab_size, recipe.block_size))

        def progress(step: int) -> str:
            if step % (2 * every) == 0:  # a copy on disk, in case the run is cut short
                save_checkpoint(target_dir, model, tokenizer)
            with fabric.autocast():
                losses = token_losses(model, held_out_tokens[: 16 * recipe.block_size + 1], recipe.block_size)
            return f"held-out {losses.mean():.4f}"

        train_target(fabric, model, tokens, recipe, seed=seed, compile=compile, every=every, report=progress)
        save_checkpoint(target_dir, model, tokenizer)
        console.print(f"target done after {time.perf_counter() - start:.0f} s")

    # The draft learns from the weights as they are shipped, in bf16.
    target = load_model(target_dir, torch.bfloat16, fabric.device)
    fabric.seed_everything(seed + 1, verbose=False)
    draft = new_model(model_config("draft", recipe.draft, vocab_size, recipe.block_size))
    train_draft(fabric, draft, target, tokens, recipe, seed=seed + 1, compile=compile, every=every)
    save_checkpoint(draft_dir, draft, tokenizer)
    console.print(f"both done after {time.perf_counter() - start:.0f} s: {target_dir}, {draft_dir}")


if __name__ == "__main__":
    CLI(main, as_positional=False)
