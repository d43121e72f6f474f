"""Tiny random models, and texts of the engine over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import litgpt.model
import torch
from litgpt import Config

from litspec.drafters import AdaptiveK, Drafter, FixedK, SpeculativeK, make_drafter
from litspec.drafters.speculative_k import Acceptance
from litspec.engine.costs import modelled
from litspec.engine.engine import Engine, Request
from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.model import GPT
from litspec.placement import Single
from litspec.sampling import Sampling, make_sampler
from litspec.stopping import StopTokens

VOCAB = 64
PROMPT = [5, 9, 9, 7, 5, 9, 9, 7, 21, 5]
GREEDY = Sampling(temperature=0)
COUPLED = Sampling(temperature=0.8, top_k=20, sampler="coupled")
REJECTION = Sampling(temperature=0.9)
SEED = 2**40 + 77


def gpt(seed: int = 0, n_layer: int = 2, vocab: int = VOCAB, block_size: int = 512) -> GPT:
    """A random Llama with logits large enough for text that does not repeat itself at once."""
    config = Config(
        block_size=block_size,
        n_layer=n_layer,
        n_embd=32,
        n_head=4,
        n_query_groups=2,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=48,
        bias=False,
        parallel_residual=False,
    )
    model = GPT(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            scale = 1.0 if "wte" in name else 0.4
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    return model


def disturbed(model: GPT, noise: float = 0.03) -> GPT:
    """A draft that sometimes agrees with the model."""
    other = GPT(model.config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    other.load_state_dict(
        {name: p + noise * torch.randn(p.shape, generator=generator) for name, p in model.state_dict().items()}
    )
    return other


def litgpt_model(model: GPT, n_layer: int | None = None) -> litgpt.model.GPT:
    """LitGPT's own model with the same weights, without a cache; all layers, or the first ones."""
    other = litgpt.model.GPT(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    if n_layer is not None:
        other.transformer.h = other.transformer.h[:n_layer]
    return other


TARGET = gpt()
DRAFT = disturbed(TARGET)


def place(model: GPT = TARGET, draft: GPT | None = DRAFT, width: int = 8) -> Single:
    return Single(model=model, draft_model=draft, device=torch.device("cpu"), verify_width=width)


def choose_k(k: int | str, placed: Single, drafter: Drafter | None) -> SpeculativeK:
    """As in `SpecLLM` for texts that depend on k."""
    if drafter is None:
        return FixedK(0)
    most = min(drafter.max_k, placed.verify_width - 1)
    return FixedK(k) if isinstance(k, int) else AdaptiveK(modelled(placed, drafter, most), Acceptance(most))


def request(
    placed: Single,
    drafter: Drafter | None,
    sampling: Sampling,
    *,
    k: int | str = 4,
    new: int = 40,
    stops: Sequence[Sequence[int]] = (),
    seed: int = SEED,
    prompt: Sequence[int] = PROMPT,
    min_new: int = 0,
) -> Request:
    """A text for an engine. Stops are ignored in its first `min_new` tokens, and single stop tokens are banned."""
    until = len(prompt) + min_new if min_new else 0
    sampler = make_sampler(sampling, seed=seed, banned=[s[0] for s in stops if len(s) == 1], banned_until=until)
    stop = StopTokens(stops, ignore_first=min_new)
    return Request(prompt, len(prompt) + new, stop, sampler, choose_k(k, placed, drafter))


def complete(
    drafter: Drafter | str,
    sampling: Sampling,
    *,
    placed: Single | None = None,
    engine: Engine | None = None,
    **settings: Any,
) -> list[Block]:
    """One text, alone in an engine; settings as of `request`."""
    placed = placed or (engine.placed if engine is not None else place())
    drafter = make_drafter(drafter, placed)
    text = request(placed, drafter, sampling, **settings)
    stop_ids = [stop[0] for stop in settings.get("stops", ()) if len(stop) == 1]
    engine = engine or Engine(placed, drafter, max_length=text.max_length, stop_ids=stop_ids)
    handle = engine.add(text)
    blocks: list[Block] = []
    while len(engine):
        block = engine.step()[handle]
        if isinstance(block, InputError):
            raise block
        blocks.append(block)
    return blocks


def tokens_of(blocks: Sequence[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


def proposed_and_accepted(blocks: Sequence[Block]) -> tuple[int, int]:
    return sum(block.proposed for block in blocks), sum(block.accepted for block in blocks)
