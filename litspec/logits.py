"""Processing of logits by a text's settings: bias, bans and penalties.

The order is: bias and bans, penalties, top-k, temperature, top-p, min-p. The first two are here, the others in
`litspec.sampling`. Each row of a block sees the prompt, the text, and the proposals before it. Target and drafter
process their logits in the same way.

The counts of a text are tensors that change when tokens are committed. The counts of a block's proposals are computed
inside the step. A refused proposal therefore leaves no trace.

Shapes: R rows of a block, V ids of the target, N words of at most L + 1 tokens.
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
    """What settings ask for, in token ids.

    Attributes:
        logit_bias: Added to the logits of these ids.
        bad_words: Sequences of ids, of one or more, that never come: the last of one has probability 0 where the text
            ends in the others.
        repetition_penalty: Positive logits of ids that stand in the prompt or the text are divided by it, the others
            multiplied (Keskar et al. 2019, arXiv 1909.05858, as in transformers).
        presence_penalty: Taken once from the logit of an id that stands in the text.
        frequency_penalty: Taken from the logit of an id as often as it stands in the text.
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
    """What is known of a text before the first row of a block, as tensors: inputs of a step that may be compiled.

    Those of several texts are stacked: each has a dimension more in front.

    Attributes:
        bias: (V,) float32, added to logits; -inf for an id that is banned everywhere.
        penalties: (3,) float32: repetition, presence, frequency.
        prompted: (V,) bool, the ids of the prompt.
        counts: (V,) float32, how often each id stands in the text.
        tail: (L,) int64, the last tokens of prompt and text; -1 before the first.
        heads: (N, L) int64, bad words without their last token, aligned to the right; -1 stands for any token.
        lasts: (N,) int64, their last tokens.
        masks: (R, V / 32) int32, for each row of the block the ids that a grammar allows, a bit each.
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
        """Whether it is that of several texts."""
        one = next((tensor for tensor in (self.bias, self.counts, self.tail) if tensor is not None), None)
        if one is None:
            return self.masks is not None and self.masks.dim() > 2
        return one.dim() > 1

    @classmethod
    def stacked(cls, contexts: Sequence[Context]) -> Context:
        """Those of several texts whose processors are of one kind."""
        fields = [[tensor for tensor in tensors if tensor is not None] for tensors in zip(*contexts)]
        return cls(*(torch.stack(tensors) if tensors else None for tensors in fields))

    def row(self, i: int, before: torch.Tensor | None) -> Context:
        """Of the i-th row of each text, for a block of one row; `before` are the tokens that stand before it."""
        masks = None if self.masks is None else self.masks[..., i : i + 1, :]
        return (self if before is None else self.after(before))._replace(masks=masks)

    def after(self, tokens: torch.Tensor) -> Context:
        """The same with some tokens more, (..., m) int64, behind which a grammar has not been asked."""
        counts, tail = self.counts, self.tail
        if counts is not None:
            counts = counts + _one_hot(tokens, counts.size(-1)).sum(-2)
        if tail is not None:
            tail = torch.cat((tail, tokens), -1)[..., -tail.size(-1) :]
        masks = self.masks if self.masks is None or not tokens.size(-1) else torch.full_like(self.masks, -1)
        return self._replace(counts=counts, tail=tail, masks=masks)


def _one_hot(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """(..., m) -> (..., m, size) float32; a row of zeros for an id that is none."""
    return (tokens.unsqueeze(-1) == torch.arange(size, device=tokens.device)).float()


def adjusted(logits: torch.Tensor, context: Context, proposed: torch.Tensor | None = None) -> torch.Tensor:
    """Logits after bias, bans and penalties.

    Args:
        logits: (..., R, v), of the target, or of a drafter that has the first v of its ids.
        context: Of the first row of each text.
        proposed: (..., R - 1) int64, the tokens that stand before each further row; -1 where there is none. None: all
            rows of a text stand at the same place.

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
        # Counts of small whole numbers are exact, so a row does not depend on how its block was cut.
        counts = context.counts[..., None, :size] + F.pad(_one_hot(proposed, size).cumsum(-2), (0, 0, 1, 0))
        seen = context.prompted[..., None, :size] | (counts > 0)
        repetition, presence, frequency = context.penalties[..., None, None].unbind(-3)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


def _without_bad_words(logits: torch.Tensor, context: Context, proposed: torch.Tensor) -> torch.Tensor:
    tail, heads, lasts = context.tail, context.heads, context.lasts
    assert tail is not None and heads is not None and lasts is not None
    # The last L tokens before each row, (..., R, L), compared with each word's.
    ends = torch.cat((tail, proposed), -1).unfold(-1, tail.size(-1), 1)
    heads = heads.unsqueeze(-3)
    match = ((ends.unsqueeze(-2) == heads) | (heads < 0)).all(-1).float()
    # A drafter may lack an id: that one goes to a column of its own, which is cut off.
    size = logits.size(-1)
    hits = torch.zeros(*match.shape[:-1], size + 1, device=logits.device)
    hits = hits.scatter_add(-1, lasts.clamp(max=size).unsqueeze(-2).expand(match.shape), match)
    return torch.where(hits[..., :size] > 0, float("-inf"), logits)


class LogitsProcessor:
    """Applies rules to one text.

    Args:
        rules: What is asked for.
        prompt: Token ids.
        vocab_size: V.
        grammar: Of the text; it is told elsewhere of the tokens that are committed.
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
    def kind(self) -> tuple[Any, ...]:
        """What a compiled graph depends on: equal for texts that may share it."""
        rules = self.rules
        penalises = rules.penalties != (1.0, 0.0, 0.0)
        words = len(self._words), self._tail_size
        return bool(rules.logit_bias or self._single), penalises, words, self.grammar is not None

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens that have become part of the text."""
        self._tokens += tokens
        for device, context in self._contexts.items():
            self._contexts[device] = context.after(torch.tensor(tokens, dtype=torch.int64, device=device))

    def context(self, device: torch.device, rows: int = 1) -> Context:
        """The context of the token that comes next, for a block of so many rows."""
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
    """The rules that settings ask for, with the tokenizer's ids in place of strings.

    Raises:
        InputError: An id that the model does not have; a string that is no token, or that has no tokens.
    """
    size = codec.config.padded_vocab_size
    bias: dict[int, float] = {}
    for token, value in (settings.logit_bias or {}).items():
        # JSON has strings for keys, so there an id comes as its digits.
        id_ = codec.token_id(token) if isinstance(token, str) and not _is_number(token) else int(token)
        if not 0 <= id_ < size:
            raise InputError(f"logit_bias names the id {id_}; the model's ids are in [0, {size}).")
        bias[id_] = bias.get(id_, 0.0) + value
    words: list[tuple[int, ...]] = []
    for word in settings.bad_words or ():
        for ids in codec.spellings(word) if isinstance(word, str) else [list(word)]:
            if not all(0 <= id_ < size for id_ in ids):
                raise InputError(f"bad_words holds {list(ids)}; the model's ids are in [0, {size}).")
            words.append(tuple(ids))
    words = list(dict.fromkeys(words))
    if len({word[0] for word in words if len(word) == 1}) == size:
        raise InputError("bad_words bans every token that the model has; leave at least one.")
    return LogitsRules(bias, words, settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)


def _is_number(token: str) -> bool:
    return token.isascii() and token.isdigit()
