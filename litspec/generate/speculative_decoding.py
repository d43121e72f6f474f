"""Drop-in for `litgpt.generate.speculative_decoding`: change the import, keep the call.

The names, arguments and return values are LitGPT's. The models may be any `nn.Module` with LitGPT's forward
`(idx, input_pos, input_pos_maxp1)` and a `max_seq_length`; their K/V caches must be set up. `SpecLLM` has additional
features: equal bits with and without a drafter, other drafters, and a single read per round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import litgpt.model
import torch
import torch.nn as nn

from litspec.arguments import checked
from litspec.engine.sequence import Text
from litspec.errors import InputError
from litspec.model.attention import CausalSelfAttention, MultiheadLatentAttention
from litspec.sampling import Greedy, Rejection, Sampling, Verified, concatenate
from litspec.stopping import StopTokens, stop_sequences

__all__ = ["generate", "next_token", "speculative_decoding"]

# The classes of `litspec.model.GPT` are similar to LitGPT's but do not have the problems of LitGPT's caches.
_LITGPT_ATTENTION = (litgpt.model.CausalSelfAttention, litgpt.model.MultiheadLatentAttention)
_OUR_ATTENTION = (CausalSelfAttention, MultiheadLatentAttention)

# Vocabulary sizes of models without a LitGPT config, from the last logits.
_seen_vocab_sizes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _sampler(temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Greedy | Rejection:
    sampling = Sampling(temperature, top_k, top_p)
    return Greedy(sampling) if sampling.greedy else Rejection(sampling)


def _vocab_size(model: nn.Module) -> int | None:
    size = getattr(getattr(model, "config", None), "padded_vocab_size", None)
    return size if isinstance(size, int) else _seen_vocab_sizes.get(model)


def _forward(model: nn.Module, tokens: torch.Tensor, input_pos: torch.Tensor, input_pos_maxp1: Any) -> torch.Tensor:
    """(T,) tokens at (T,) positions -> (T', V) logits, T' <= T rows, the last ones."""
    logits = model(idx=tokens.view(1, -1), input_pos=input_pos, input_pos_maxp1=input_pos_maxp1)[0]
    _seen_vocab_sizes[model] = logits.size(-1)
    return logits


def _known_to(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Replaces ids that a draft model lacks by 0. Nothing is read to the host."""
    size = _vocab_size(model)
    if size is None:
        size = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    return tokens if size is None else torch.where(tokens < size, tokens, 0)


def _plus(input_pos_maxp1: int | torch.Tensor | None, i: int) -> int | torch.Tensor | None:
    return None if input_pos_maxp1 is None else input_pos_maxp1 + i


class _NotFinite(InputError):
    def __init__(self, model: str, position: int) -> None:
        super().__init__(
            f"The {model} model's logits at position {position} hold NaN or inf; check its weights and precision."
        )
        self.position = position


def next_token(
    model: nn.Module,
    input_pos: torch.Tensor,
    x: torch.Tensor,
    input_pos_maxp1: int | torch.Tensor | None = None,
    **sample_kwargs: Any,
) -> torch.Tensor:
    """Runs a model over tokens and chooses the next token.

    Args:
        model: See the module's docstring.
        input_pos: (T,) int64, positions of the tokens.
        x: (1, T), the tokens.
        input_pos_maxp1: Largest position plus 1, if known.
        sample_kwargs: `temperature`, `top_k`, `top_p`.

    Returns:
        (1,) int64.

    Raises:
        InputError: A setting is invalid, or logits are not finite.
    """
    sampler = _sampler(**sample_kwargs)
    logits = _forward(model, x, input_pos, input_pos_maxp1)[-1:]
    empty = torch.empty(0, dtype=torch.int64, device=logits.device)
    verified = sampler.verify(logits, 0, empty)
    if not verified.finite:
        raise _NotFinite("given", int(input_pos[-1]))
    return verified.tokens


def speculative_decoding(
    draft_model: nn.Module,
    target_model: nn.Module,
    token: torch.Tensor,
    input_pos: torch.Tensor,
    input_pos_maxp1: int | torch.Tensor | None,
    speculative_k: int,
    **sample_kwargs: Any,
) -> torch.Tensor:
    """One round: the draft model proposes, the target verifies all proposals in one forward pass.

    Args:
        draft_model: The draft model. Its cache should hold all positions before `input_pos`, as it does after a prefill
            and after a round with `speculative_k` of at least 1. A gap lowers acceptance; the text stays correct.
        target_model: The target. Its cache must hold all positions before `input_pos`.
        token: (1,) int64, the last committed token.
        input_pos: (1,) int64, its position.
        input_pos_maxp1: Its position plus 1, if known.
        speculative_k: Tokens to propose; 0 is one plain step of the target.
        sample_kwargs: `temperature`, `top_k`, `top_p`.

    Returns:
        (n,) int64, 1 <= n <= speculative_k + 1: the accepted proposals, then one token of the target's own.

    Raises:
        InputError: A setting is invalid, or logits are not finite (the message names the model and the position).
    """
    checked("speculative_k", speculative_k, int)
    if speculative_k < 0:
        raise InputError(f"speculative_k must be at least 0, got {speculative_k}")
    sampler = _sampler(**sample_kwargs)
    token = token.view(1).to(torch.int64)
    input_pos = input_pos.view(1)
    if speculative_k > 0 and _vocab_size(target_model) is None:
        # There was no prefill through this module. Verification overwrites this entry of the cache.
        _forward(target_model, token, input_pos, input_pos_maxp1)

    proposal, verified, logits, draft_finite = _round(
        draft_model, target_model, token, input_pos, input_pos_maxp1, speculative_k, sampler
    )
    # One read: how many tokens to return, and whether all logits were finite.
    outcome = torch.cat((verified.accepted.view(1), verified.finite.view(1), draft_finite))
    accepted, target_ok, *draft_ok = outcome.tolist()
    if not all(draft_ok):
        raise _NotFinite("draft", int(input_pos) + draft_ok.index(0))
    if not target_ok:
        raise _NotFinite("target", int(input_pos) + logits.amax(-1).isfinite().tolist().index(False))
    if accepted == speculative_k > 0:
        # The draft model has not run its last proposal, and the next call does not include it.
        _forward(draft_model, proposal[-1], input_pos + speculative_k, _plus(input_pos_maxp1, speculative_k))
    return verified.tokens[: accepted + 1]


def _round(
    draft_model: nn.Module,
    target_model: nn.Module,
    token: torch.Tensor,
    input_pos: torch.Tensor,
    input_pos_maxp1: int | torch.Tensor | None,
    k: int,
    sampler: Greedy | Rejection,
) -> tuple[torch.Tensor, Verified, torch.Tensor, torch.Tensor]:
    """Drafts, verifies and accepts, without a read to the host.

    Returns:
        The proposal, (k,); its verification; the target's logits, (k + 1, V); whether the draft's were finite, (k,).
    """
    # Draft: k tokens, one by one. Ids that the target does not have are never proposed.
    vocab_size = _vocab_size(target_model)
    proposal, rows, finite = token[:0], [], []
    drafted = _known_to(draft_model, token)
    alive = torch.ones_like(token, dtype=torch.bool)
    for i in range(k):
        logits = _forward(draft_model, drafted, input_pos + i, _plus(input_pos_maxp1, i))[-1:, :vocab_size]
        top = logits.amax(-1)
        # If the draft model allows none of the target's ids, the proposal ends here.
        nothing = top == float("-inf")
        alive = alive & ~nothing
        drafted, q = sampler.draw(torch.where(nothing, 0.0, logits), 0)
        proposal = torch.cat((proposal, torch.where(alive, drafted, -1)))
        rows.append(q)
        finite.append(torch.where(nothing, 0.0, top))
    drawn = [row for row in rows if row is not None]  # all of them, or none
    q = concatenate(drawn) if drawn else None

    # Verify: k + 1 rows of the target in one pass.
    positions = input_pos + torch.arange(k + 1, device=input_pos.device)
    block = torch.cat((token, proposal.clamp_min(0)))
    logits = _forward(target_model, block, positions, _plus(input_pos_maxp1, k))
    if logits.size(0) != k + 1:
        raise InputError(
            f"The target model must return logits for each of the {k + 1} tokens of a block, got {logits.size(0)}."
        )

    # Accept.
    verified = sampler.verify(logits, 0, proposal, q)
    return proposal, verified, logits, torch.cat((*finite, logits.new_empty(0))).isfinite()


def _check_can_verify(model: nn.Module, name: str) -> None:
    """Raises an `InputError` for LitGPT models, also with LoRA or adapters, whose caches do not support rejection."""
    for module in model.modules():
        if not isinstance(module, _LITGPT_ATTENTION) or isinstance(module, _OUR_ATTENTION):
            continue
        config = module.config
        if getattr(module, "apply_sliding_window_attention", False) and (
            config.sliding_window_size < model.max_seq_length
        ):
            window = config.sliding_window_size
            reason = f"its sliding-window layers (window {window}) overwrite valid keys with rejected drafts"
        elif config.attention_logit_softcapping is not None:
            reason = "its soft-capped attention is not causal with a cache"
        else:
            continue
        raise InputError(
            f"The {name} model {config.name!r} is a litgpt GPT that cannot verify blocks: {reason}. "
            "Load its weights into litspec.model.GPT, which takes the same config and checkpoint."
        )


def _check_settings(
    draft_model: nn.Module, target_model: nn.Module, prompt: torch.Tensor, max_returned_tokens: int, speculative_k: int
) -> None:
    checked("speculative_k", speculative_k, int)
    if speculative_k < 0:
        raise InputError(f"speculative_k must be at least 0, got {speculative_k}")
    if prompt.dim() != 1 or prompt.size(0) == 0:
        raise InputError(f"prompt must be a tensor of shape (T,) with at least one token, got {tuple(prompt.shape)}")
    checked("max_returned_tokens", max_returned_tokens, int)
    if max_returned_tokens <= prompt.size(0):
        raise InputError(
            f"max_returned_tokens counts prompt and completion, so it must be above the prompt's {prompt.size(0)} "
            f"tokens, got {max_returned_tokens}"
        )
    for name, model in (("draft", draft_model), ("target", target_model)):
        max_seq_length: Any = model.max_seq_length  # a LitGPT model has it
        # The last token is returned but not run.
        if max_seq_length < max_returned_tokens - 1:
            raise InputError(
                f"The {name} model's max_seq_length must be at least max_returned_tokens - 1 = "
                f"{max_returned_tokens - 1}, got {max_seq_length}"
            )
        _check_can_verify(model, name)


@torch.inference_mode()
def generate(
    draft_model: nn.Module,
    target_model: nn.Module,
    prompt: torch.Tensor,
    max_returned_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_tokens: Iterable[Any] = (),
    include_prompt: bool = True,
    speculative_k: int,
) -> tuple[torch.Tensor, float]:
    """Generates a text with a draft and a target model; it is the text of the target alone.

    With greedy sampling (temperature 0 or top_p 0), each token is the target's argmax. Otherwise the text has the
    target's distribution. Random numbers come from torch's global generator: `torch.manual_seed` makes a call
    repeatable.

    Args:
        draft_model: The draft model. Both caches are filled from position 0.
        target_model: The target.
        prompt: (T,) token ids.
        max_returned_tokens: Most tokens of prompt and completion together.
        temperature: See `sampling.Sampling`, also for `top_k` and `top_p`.
        top_k: Keeps only the k most likely tokens.
        top_p: Keeps the smallest set of most likely tokens with at least this probability.
        stop_tokens: A flat list of ids, or an iterable of id sequences. The first one that is complete in the
            completion ends the text and is not returned.
        include_prompt: Whether the returned tokens begin with the prompt.
        speculative_k: Tokens to propose per round; 0 for plain decoding.

    Returns:
        The tokens, on the prompt's device: with the prompt in its dtype, else int64 and possibly of shape (0,). And the
        acceptance rate: accepted over proposed tokens up to the end of the text, 0.0 without proposals.

    Raises:
        InputError: A ValueError: a setting is out of range, the prompt has no tokens, a `max_seq_length` is too small,
            a model cannot verify blocks, or logits are not finite.
    """
    # Looked up at call time, since callers may replace these two functions in this module.
    module = sys.modules[__name__]
    sample_kwargs: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    Sampling(**sample_kwargs)
    _check_settings(draft_model, target_model, prompt, max_returned_tokens, speculative_k)
    device, prompt_size = prompt.device, prompt.size(0)
    # Thunder compiles forwards without a Python int for the largest position.
    thunder = any(m.__class__.__name__ == "ThunderModule" for m in target_model.modules())

    def maxp1(size: int) -> int | None:
        return None if thunder else size

    def prefill() -> torch.Tensor:
        input_pos = torch.arange(prompt_size, device=device)
        for name, model in (("draft", draft_model), ("target", target_model)):
            tokens = _known_to(model, prompt) if name == "draft" else prompt
            try:
                token = module.next_token(
                    model, input_pos, tokens.view(1, -1), input_pos_maxp1=maxp1(prompt_size), **sample_kwargs
                )
            except _NotFinite as error:
                raise _NotFinite(name, error.position) from None
        return token.view(-1)

    def step(token: torch.Tensor, input_pos: int, k: int) -> torch.Tensor:
        tokens = module.speculative_decoding(
            draft_model=draft_model,
            target_model=target_model,
            token=token,
            input_pos=torch.tensor([input_pos], device=device),
            input_pos_maxp1=maxp1(input_pos + 1),
            speculative_k=k,
            **sample_kwargs,
        )
        return tokens.view(-1)

    text = Text(prompt_size, max_returned_tokens, StopTokens(stop_sequences(stop_tokens)))
    tokens: list[int] = []
    proposed = accepted = k = 0
    result = prefill()
    while True:
        block = text.commit(result.tolist(), k)
        tokens += block.tokens
        proposed += block.proposed
        accepted += block.accepted
        if text.finished:
            break
        k = min(speculative_k, text.most_proposals)
        result = step(result[-1:], text.input_pos, k)
    completion = torch.tensor(tokens, dtype=torch.int64, device=device)
    if include_prompt:
        completion = torch.cat((prompt, completion.to(prompt.dtype)))
    return completion, accepted / proposed if proposed else 0.0
