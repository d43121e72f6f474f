"""Processing of logits by a text's settings: bias, bans and penalties.

The order is: bias and bans, penalties, top-k, temperature, top-p, min-p. The first two are here, the others in
`litspec.sampling`. Each row of a block sees the prompt, the text, and the proposals before it. Target and drafter
process their logits in the same way.

The counts of a text are tensors that change when tokens are committed. The counts of a block's proposals are computed
inside the step, so rejected proposals do not change the state.

Shapes: R rows of a block, V ids of the target, N bad words of at most L + 1 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from litspec.errors import InputError

if TYPE_CHECKING:
    from litspec.config import GenerateConfig
    from litspec.grammar import Grammar
    from litspec.text import TextCodec


@dataclass(frozen=True)
class LogitsRules:
    """The settings for logits, as token ids.

    Attributes:
        logit_bias: Added to the logits of these ids.
        bad_words: Banned sequences of one or more ids. The last id has probability 0 if the text ends with the others.
        repetition_penalty: For ids in the prompt or the text, positive logits are divided by it and negative ones
            multiplied (Keskar et al. 2019, arXiv 1909.05858, as in transformers).
        presence_penalty: Subtracted once from the logits of ids in the text.
        frequency_penalty: Subtracted from the logit of an id once for each occurrence in the text.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence, frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    def __bool__(self) -> bool:
        """Whether they change anything."""
        return bool(self.logit_bias or self.bad_words or self.penalties != (1.0, 0.0, 0.0))


class Context(NamedTuple):
    """The state of a text before the first row of a block, as tensors, which are inputs of a compiled step.

    For several texts the tensors are stacked, with one more dimension in front.

    Attributes:
        bias: (V,) float32, added to logits; -inf for an id that is banned everywhere.
        penalties: (3,) float32: repetition, presence, frequency.
        prompted: (V,) bool, the ids of the prompt.
        counts: (V,) float32, how often each id occurs in the text.
        tail: (L,) int64, the last tokens of prompt and text; -1 before the first.
        heads: (N, L) int64, bad words without their last token, aligned to the right; -1 stands for any token.
        lasts: (N,) int64, the last token of each bad word.
        masks: (R, V / 32) int32, for each row of the block the ids that a grammar allows, one bit per id.
    """

    bias: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    prompted: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    heads: torch.Tensor | None = None
    lasts: torch.Tensor | None = None
    masks: torch.Tensor | None = None

    @property
    def batched(self) -> bool:
        """Whether it holds several texts."""
        one = next((tensor for tensor in (self.bias, self.counts, self.tail) if tensor is not None), None)
        if one is None:
            return self.masks is not None and self.masks.dim() > 2
        return one.dim() > 1

    @classmethod
    def stacked(cls, contexts: Sequence[Context]) -> Context:
        """Stacks the contexts of several texts whose processors have equal `batch_key`s."""
        fields = [[tensor for tensor in tensors if tensor is not None] for tensors in zip(*contexts)]
        return cls(*(torch.stack(tensors) if tensors else None for tensors in fields))

    def row(self, i: int, before: torch.Tensor | None) -> Context:
        """The context of the i-th row of each text, for a block of one row; `before` are the block's tokens before."""
        masks = None if self.masks is None else self.masks[..., i : i + 1, :]
        return (self if before is None else self.after(before))._replace(masks=masks)

    def after(self, tokens: torch.Tensor) -> Context:
        """The context after m more tokens, (..., m) int64. Grammar masks then allow all ids."""
        counts, tail = self.counts, self.tail
        if counts is not None:
            counts = counts + _one_hot(tokens, counts.size(-1)).sum(-2)
        if tail is not None:
            tail = torch.cat((tail, tokens), -1)[..., -tail.size(-1) :]
        masks = self.masks if self.masks is None or not tokens.size(-1) else torch.full_like(self.masks, -1)
        return self._replace(counts=counts, tail=tail, masks=masks)


def _one_hot(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """(..., m) -> (..., m, size) float32; an invalid id gives a row of zeros."""
    return (tokens.unsqueeze(-1) == torch.arange(size, device=tokens.device)).float()


def adjusted(logits: torch.Tensor, context: Context, proposed: torch.Tensor | None = None) -> torch.Tensor:
    """Logits after bias, bans and penalties.

    Args:
        logits: (..., R, v), of the target, or of a drafter that has the target's first v ids.
        context: Context of the first row of each text.
        proposed: (..., R - 1) int64, the token before each later row; -1 for none. None: all rows of a text are at the
            same position.

    Returns:
        (..., R, v) float32.
    """
    logits = logits.float()
    size = logits.size(-1)
    if proposed is None:
        proposed = torch.empty(*logits.shape[:-2], 0, dtype=torch.int64, device=logits.device)
    if context.bias is not None:
        logits = logits + context.bias[..., None, :size]
    if context.heads is not None:
        logits = _without_bad_words(logits, context, proposed)
    if context.masks is not None:
        bits = context.masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device)
        logits = torch.where((bits.flatten(-2)[..., :size] & 1).bool(), logits, float("-inf"))
    if context.counts is not None and context.penalties is not None and context.prompted is not None:
        # Small integer counts are exact in float32, so a row does not depend on the size of its block.
        counts = context.counts[..., None, :size] + F.pad(_one_hot(proposed, size).cumsum(-2), (0, 0, 1, 0))
        seen = context.prompted[..., None, :size] | (counts > 0)
        repetition, presence, frequency = context.penalties[..., None, None].unbind(-3)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


def _without_bad_words(logits: torch.Tensor, context: Context, proposed: torch.Tensor) -> torch.Tensor:
    tail, heads, lasts = context.tail, context.heads, context.lasts
    assert tail is not None and heads is not None and lasts is not None
    # The last L tokens before each row, (..., R, L), compared with each bad word.
    ends = torch.cat((tail, proposed), -1).unfold(-1, tail.size(-1), 1)
    heads = heads.unsqueeze(-3)
    match = ((ends.unsqueeze(-2) == heads) | (heads < 0)).all(-1).float()
    # Ids that a drafter lacks go to an extra column, which is dropped.
    size = logits.size(-1)
    hits = torch.zeros(*match.shape[:-1], size + 1, device=logits.device)
    hits = hits.scatter_add(-1, lasts.clamp(max=size).unsqueeze(-2).expand(match.shape), match)
    return torch.where(hits[..., :size] > 0, float("-inf"), logits)


class LogitsProcessor:
    """Applies rules to one text.

    Args:
        rules: The rules.
        prompt: Token ids of the prompt.
        vocab_size: V.
        grammar: The text's grammar; committed tokens reach it through `stopping.Stop.push`, not from here.
    """

    def __init__(
        self, rules: LogitsRules, prompt: Sequence[int], vocab_size: int, grammar: Grammar | None = None
    ) -> None:
        self.rules = rules
        self.grammar = grammar
        self.vocab_size = vocab_size
        self._prompt = list(prompt)
        self._tokens: list[int] = []
        self._single = [word[0] for word in rules.bad_words if len(word) == 1]
        self._words = [list(word) for word in rules.bad_words if len(word) > 1]
        self._tail_size = max((len(word) - 1 for word in self._words), default=0)
        self._contexts: dict[torch.device, Context] = {}

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """The part of a graph's key for processing: equal for texts that can share a graph."""
        rules = self.rules
        penalises = rules.penalties != (1.0, 0.0, 0.0)
        words = len(self._words), self._tail_size
        return bool(rules.logit_bias or self._single), penalises, words, self.grammar is not None

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes committed tokens of the completion."""
        self._tokens += tokens
        for device, context in self._contexts.items():
            self._contexts[device] = context.after(torch.tensor(tokens, dtype=torch.int64, device=device))

    def context(self, device: torch.device, rows: int = 1) -> Context:
        """The context of the next token, for a block of `rows` rows."""
        if device not in self._contexts:
            self._contexts[device] = self._new_context(device)
        context = self._contexts[device]
        return context if self.grammar is None else context._replace(masks=self.grammar.masks(rows).to(device))

    def _new_context(self, device: torch.device) -> Context:
        rules, size = self.rules, self.vocab_size
        context = Context()
        if rules.logit_bias or self._single:
            bias = torch.zeros(size)
            for id_, value in rules.logit_bias.items():
                bias[id_] = value
            bias[self._single] = float("-inf")
            context = context._replace(bias=bias.to(device))
        if rules.penalties != (1.0, 0.0, 0.0):
            prompted = torch.zeros(size, dtype=torch.bool)
            prompted[self._prompt] = True
            counts = torch.zeros(size)
            for id_, count in Counter(self._tokens).items():
                counts[id_] = count
            context = context._replace(
                penalties=torch.tensor(rules.penalties, dtype=torch.float32, device=device),
                prompted=prompted.to(device),
                counts=counts.to(device),
            )
        if self._words:
            length = self._tail_size
            heads = [[-1] * (length + 1 - len(word)) + word[:-1] for word in self._words]
            tail = ([-1] * length + self._prompt + self._tokens)[-length:]
            context = context._replace(
                tail=torch.tensor(tail, device=device),
                heads=torch.tensor(heads, device=device),
                lasts=torch.tensor([word[-1] for word in self._words], device=device),
            )
        return context


def rules_of(settings: GenerateConfig, codec: TextCodec) -> LogitsRules:
    """The rules of some settings, with strings converted to the tokenizer's ids.

    Raises:
        InputError: The model does not have an id, or a string is not a token or has no tokens.
    """
    size = codec.config.padded_vocab_size
    bias: dict[int, float] = {}
    for token, value in (settings.logit_bias or {}).items():
        # JSON keys are strings, so an id may be given as digits.
        id_ = codec.token_id(token) if isinstance(token, str) and not _is_number(token) else int(token)
        if not 0 <= id_ < size:
            raise InputError(f"logit_bias has the id {id_}, but the model's ids are in [0, {size}).")
        bias[id_] = bias.get(id_, 0.0) + value
    words: list[tuple[int, ...]] = []
    for word in settings.bad_words or ():
        for ids in codec.spellings(word) if isinstance(word, str) else [list(word)]:
            if not all(0 <= id_ < size for id_ in ids):
                raise InputError(f"bad_words has {list(ids)}, but the model's ids are in [0, {size}).")
            words.append(tuple(ids))
    words = list(dict.fromkeys(words))
    if len({word[0] for word in words if len(word) == 1}) == size:
        raise InputError("bad_words bans all tokens of the model; allow at least one.")
    return LogitsRules(bias, words, settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)


def _is_number(token: str) -> bool:
    return token.isascii() and token.isdigit()
