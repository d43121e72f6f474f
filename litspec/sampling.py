"""From logits to tokens: processed distributions, three samplers, and their rules of acceptance.

Shapes: R rows of logits, V ids in the (padded) vocabulary, K candidates left after top-k, m proposals. "..." is empty
for one text, or the number of texts N for a batch.

Nothing here reads a value to the host. All arithmetic is in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from litspec.arguments import checked, hints_of
from litspec.config import check_sampling
from litspec.logits import Context, LogitsProcessor, adjusted
from litspec.logprobs import Logprobs, Measured, measure
from litspec.noise import gumbel_noise, position_keys, seed_words, uniform_noise
from litspec.types import SamplerName


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied in LitGPT's order: top-k, temperature, top-p; then min-p.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Keeps only the k most likely tokens; None keeps all.
        top_p: Keeps the smallest set of most likely tokens with at least this probability; 0 is greedy, 1 keeps all.
        sampler: "rejection" accepts the most proposals; "coupled" makes the text independent of drafter and k.
        min_p: Keeps tokens with at least this fraction of the highest probability; 0 keeps all (Nguyen et al. 2024,
            arXiv 2407.01082).

    Raises:
        InputError: A value has a wrong type or is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    sampler: SamplerName = "rejection"
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, hint in hints_of(Sampling).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def greedy(self) -> bool:
        # A temperature below float32's normal range counts as 0.
        return self.temperature < torch.finfo(torch.float32).tiny or self.top_p == 0


class Distribution(NamedTuple):
    """R distributions over tokens.

    Attributes:
        probs: (..., R, K) float32, each row sums to 1.
        ids: (..., R, K) int64, the token of each column; None if column j is token j (K = V).
    """

    probs: torch.Tensor
    ids: torch.Tensor | None = None

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The probability of one token per row: (..., R) -> (..., R)."""
        if self.ids is None:
            return self.probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return (self.probs * (self.ids == tokens.unsqueeze(-1))).sum(-1)

    def row(self, index: torch.Tensor) -> Distribution:
        """One row of each text, chosen on the device: index (...) -> (..., 1, K)."""
        return Distribution(row_of(self.probs, index), None if self.ids is None else row_of(self.ids, index))

    def first(self, m: int) -> Distribution:
        """The first m rows."""
        return Distribution(self.probs[..., :m, :], None if self.ids is None else self.ids[..., :m, :])

    def at(self, other: Distribution) -> torch.Tensor:
        """The probabilities of the candidates of `other`, row by row: (..., R, K of other)."""
        if other.ids is None:
            size = other.probs.size(-1)
            if self.ids is not None:
                return torch.zeros_like(other.probs).scatter_add_(-1, self.ids, self.probs)
            return F.pad(self.probs, (0, size - self.probs.size(-1)))
        if self.ids is not None:
            return ((other.ids.unsqueeze(-1) == self.ids.unsqueeze(-2)) * self.probs.unsqueeze(-2)).sum(-1)
        return F.pad(self.probs, (0, 1)).gather(-1, other.ids.clamp(max=self.probs.size(-1)))


def row_of(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One row of each text: (..., R, K) at (...) -> (..., 1, K)."""
    if index.dim() == 0:
        return rows.index_select(0, index.view(1))
    return rows.gather(-2, index[..., None, None].expand(*index.shape, 1, rows.size(-1)))


def concatenate(rows: Sequence[Distribution]) -> Distribution:
    """Concatenates the rows of several distributions made with the same settings."""
    ids = [row.ids for row in rows if row.ids is not None]
    return Distribution(torch.cat([row.probs for row in rows], -2), torch.cat(ids, -2) if ids else None)


def processed(logits: torch.Tensor, sampling: Sampling) -> Distribution:
    """Softmax after top-k, temperature, top-p and min-p.

    Args:
        logits: (..., R, V). An entry of -inf is a token of probability 0.
        sampling: The settings; not greedy.

    Returns:
        Sparse (K = top_k, most likely first) if top_k < V, else dense. Later operations are cheap for a sparse one.
    """
    values, ids = logits.float(), None
    if sampling.top_k is not None and sampling.top_k < logits.size(-1):
        values, ids = torch.topk(values, sampling.top_k)
    if sampling.temperature != 1:
        # Subtract the maximum first: with a low temperature it could become inf.
        values = (values - values.amax(-1, keepdim=True)) / sampling.temperature
    probs = F.softmax(values, dim=-1)
    if sampling.top_p < 1:
        # Keep a token iff it and all less likely ones sum to more than 1 - top_p; always keep the most likely one.
        descending, order = (probs, None) if ids is not None else torch.sort(probs, dim=-1, descending=True)
        keep = descending.flip(-1).cumsum(-1).flip(-1) > 1 - sampling.top_p
        keep[..., 0] = True
        if order is not None:
            keep = keep.scatter(-1, order, keep)
        probs = probs * keep
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.min_p > 0:
        probs = probs * (probs >= sampling.min_p * probs.amax(-1, keepdim=True))
        probs = probs / probs.sum(-1, keepdim=True)
    return Distribution(probs, ids)


class Verified(NamedTuple):
    """The outcome of one verification, still on the device.

    Attributes:
        tokens: (..., m + 1) int64; the first `accepted + 1` are committed.
        accepted: (...) int64, the number of accepted proposals.
        finite: (...) bool, whether all logits and proposal probabilities were finite.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    finite: torch.Tensor


class Inputs(NamedTuple):
    """The inputs of a choice other than logits and settings. They are tensors, so that texts can share a graph.

    Attributes:
        noise: The random numbers of each row, (..., R, n); n = 0 for greedy.
        early: Whether ids are banned in each row, since it is too early in its text, (..., R) bool; None without bans.
        context: The state of each text before its first row; None if logits are not processed.
    """

    noise: torch.Tensor
    early: torch.Tensor | None = None
    context: Context | None = None

    def row(self, i: int, before: Sequence[torch.Tensor] = ()) -> Inputs:
        """The inputs of the i-th row of each text, concatenated.

        Args:
            i: The row.
            before: The tokens that were drawn for the rows before it, (N,) each.
        """
        noise = self.noise[..., i : i + 1, :].flatten(0, -2)
        early = None if self.early is None else self.early[..., i : i + 1].flatten()
        if self.context is None:
            return Inputs(noise, early)
        context = self.context if self.context.batched else Context.stacked([self.context])
        return Inputs(noise, early, context.row(i, torch.stack(tuple(before), -1) if before else None))

    def after(self, tokens: torch.Tensor) -> Inputs:
        """The inputs after m more tokens of each text, (..., m) int64, which are not committed."""
        return self if self.context is None else self._replace(context=self.context.after(tokens))

    @classmethod
    def stacked(cls, inputs: Sequence[Inputs]) -> Inputs:
        """Stacks the inputs of several texts, whose samplers have equal `batch_key`s."""
        contexts = [each.context for each in inputs if each.context is not None]
        context = Context.stacked(contexts) if contexts else None
        if len(inputs) == 1:
            noise, alone, _ = inputs[0]
            return cls(noise.unsqueeze(0), None if alone is None else alone.unsqueeze(0), context)
        early = [each.early for each in inputs if each.early is not None]
        return cls(torch.stack([each.noise for each in inputs]), torch.stack(early) if early else None, context)


# Positions whose random numbers are computed together.
NOISE_CHUNK = 512
# Random numbers per row for rejection: one to draw a proposal, one to accept up to it, one for the target's own token.
NUMBERS = 3
# Rows of a round whose random numbers are computed together.
ROUND_ROWS = 16


class Sampler:
    """Chooses tokens, for the target and the drafter.

    Random numbers are a function of the seed and the position in the text. A text does not depend on earlier draws, the
    device or the process.

    Args:
        sampling: The settings.
        banned: Token ids that have probability 0 before position `banned_until`.
        banned_until: First position at which `banned` is not applied.
        seed: Any integer; its lowest 64 bits are used. None: the rejection sampler uses torch's global generator, and
            the coupled sampler seed 0.
        processor: Processes the text's logits; None for no processing.
        logprobs: Log-probabilities to return with the tokens; None for none.
    """

    def __init__(
        self,
        sampling: Sampling,
        banned: Sequence[int] = (),
        banned_until: int = 0,
        seed: int | None = None,
        processor: LogitsProcessor | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        self.sampling = sampling
        self._banned = list(banned)
        self._banned_until = banned_until
        self.seed = seed
        self.logprobs = logprobs
        self._processor = processor
        self.round: int | None = None
        self.tables: dict[torch.device, tuple[int, torch.Tensor]] = {}  # first position, and the numbers from there on

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """The part of a graph's key for `draw` and `verify`: equal for texts that can share a graph."""
        return type(self), self.sampling, *self._rules

    @property
    def processes(self) -> bool:
        """Whether logits are processed (bias, bans, penalties, a grammar)."""
        return self._processor is not None

    @property
    def _rules(self) -> tuple[Any, ...]:
        return tuple(self._banned), None if self._processor is None else self._processor.batch_key, self.logprobs

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes the committed tokens of the completion, in order; the prompt is not included."""
        if self._processor is not None:
            self._processor.commit(tokens)

    def start_round(self, position: int) -> None:
        """Begins the round whose first proposal is at `position`."""

    @staticmethod
    def start_rounds(samplers: Sequence[Sampler], positions: Sequence[int], device: torch.device) -> None:
        """Like `start_round` for many samplers; their random numbers on `device` are computed together."""
        for sampler, position in zip(samplers, positions):
            sampler.start_round(position)
        waiting = [s for s in samplers if isinstance(s, Rejection) and s.waits(device)]
        if len(waiting) > 1:
            words = torch.tensor([(*seed_words(s.seed or 0), s.round) for s in waiting], device=device)
            numbers = uniform_noise(position_keys((words[:, 0], words[:, 1]), words[:, 2]), ROUND_ROWS * NUMBERS)
            for sampler, own in zip(waiting, numbers.view(len(waiting), ROUND_ROWS, NUMBERS).unbind()):
                assert sampler.round is not None, "it has just begun"
                sampler.tables[device] = sampler.round, own

    def columns(self, vocab_size: int) -> int:
        """K, the number of candidates after top-k."""
        return min(self.sampling.top_k or vocab_size, vocab_size)

    def set_seed(self, seed: int) -> None:
        """Changes the seed."""
        self.seed = seed
        self.tables.clear()

    def inputs(self, device: torch.device, position: int, rows: int = 1) -> Inputs:
        """The inputs of `draw` or `verify` for some tokens.

        Args:
            device: Device of the logits.
            position: Position of the first token.
            rows: Number of tokens to choose.
        """
        early = None
        if self._banned:
            early = torch.arange(position, position + rows, device=device) < self._banned_until
        context = None if self._processor is None else self._processor.context(device, rows)
        return Inputs(self._noise(device, position, rows), early, context)

    def _noise(self, device: torch.device, position: int, rows: int) -> torch.Tensor:
        """The random numbers of `rows` positions, (rows, n)."""
        found = self.tables.get(device)
        if found is None or not found[0] <= position <= position + rows <= found[0] + found[1].size(0):
            positions = torch.arange(position, position + max(rows, NOISE_CHUNK), device=device)
            found = self.tables[device] = position, self._numbers(positions)
        first, table = found
        return table[position - first : position - first + rows]

    def _numbers(self, positions: torch.Tensor) -> torch.Tensor:
        """The random numbers of positions (R,), (R, n)."""
        return torch.empty(positions.size(0), 0, device=positions.device)

    def draw(self, logits: torch.Tensor, position: int | Inputs) -> tuple[torch.Tensor, Distribution | None]:
        """Draws one token from each row.

        Args:
            logits: (R, V), of the target or a draft model; one row, or one row per text.
            position: Position of the token for a single row, or the `inputs` of the rows.

        Returns:
            The tokens, (R,) int64, and the distributions that they were drawn from; None if `verify` of the same
            sampler does not use them.
        """
        raise NotImplementedError

    def verify(
        self,
        logits: torch.Tensor,
        position: int | Inputs,
        tokens: torch.Tensor,
        q: Distribution | None = None,
    ) -> Verified:
        """Accepts the longest right prefix of a proposal and adds one token of the target's own.

        Args:
            logits: (..., m + 1, V), the target's; row i is for the token at `position + i`.
            position: Position of the first proposal of a single text, or the `inputs` of all rows.
            tokens: (..., m) int64, the proposal; m = 0 is a plain step. Entries of -1 at the end are padding.
            q: m rows, the processed distributions that the proposal was drawn from; None if it is deterministic.
        """
        raise NotImplementedError

    def _at(self, logits: torch.Tensor, position: int | Inputs) -> Inputs:
        if isinstance(position, Inputs):
            return position
        return self.inputs(logits.device, position, logits.size(0))

    def ban(self, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Sets the logits of banned ids to -inf in early rows."""
        if inputs.early is None:
            return logits
        ids = torch.arange(logits.size(-1), device=logits.device)
        hidden = functools.reduce(torch.logical_or, [ids == i for i in self._banned])
        return torch.where(inputs.early.unsqueeze(-1) & hidden, float("-inf"), logits)

    def adjust(self, logits: torch.Tensor, inputs: Inputs, proposed: torch.Tensor | None = None) -> torch.Tensor:
        """Logits after bias, bans and penalties; arguments as for `logits.adjusted`."""
        if inputs.context is not None:
            logits = adjusted(logits, inputs.context, proposed)
        return self.ban(logits, inputs)

    def measure(
        self, logits: torch.Tensor, inputs: Inputs, proposed: torch.Tensor, chosen: torch.Tensor, wanted: Logprobs
    ) -> Measured:
        """Log-probabilities of chosen tokens.

        Args:
            logits: (..., R, V), the target's.
            inputs: Inputs of the rows.
            proposed: (..., R - 1), as in `verify`.
            chosen: (..., R), the tokens.
            wanted: The requested log-probabilities.
        """
        if wanted.mode == "raw":
            return measure(logits.float().log_softmax(-1), None, chosen, wanted.n)
        logits = self.adjust(logits, inputs, proposed)
        if self.sampling.greedy:
            return measure(logits.float().log_softmax(-1), None, chosen, wanted.n)
        p = processed(logits, self.sampling)
        return measure(p.probs.log(), p.ids, chosen, wanted.n)

    def _adjust_draft(self, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Like `adjust`, for one row per text, (R, V).

        If the drafter has none of the allowed ids, it draws any id, which will be rejected.
        """
        if inputs.context is None:
            return self.ban(logits, inputs)
        if inputs.context.batched:
            logits = adjusted(logits.unsqueeze(-2), inputs.context).squeeze(-2)
        else:
            logits = adjusted(logits, inputs.context)
        logits = self.ban(logits, inputs)
        return torch.where(logits.amax(-1, keepdim=True) == float("-inf"), 0.0, logits)


def right_prefix(right: torch.Tensor) -> torch.Tensor:
    """The number of True before the first False: (..., m) -> (...)."""
    return right.cumprod(-1).sum(-1)


class Choosing(Sampler):
    """A sampler whose token is a function of logits and position. A proposal is accepted iff it equals that token."""

    def _choose(self, logits: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of each row of adjusted logits, (..., R), and numbers per row, (..., R) or (..., R, K), that are
        finite iff the row has no NaN or +inf."""
        raise NotImplementedError

    def draw(self, logits: torch.Tensor, position: int | Inputs) -> tuple[torch.Tensor, None]:
        inputs = self._at(logits, position)
        return self._choose(self._adjust_draft(logits, inputs), inputs)[0], None

    def verify(
        self,
        logits: torch.Tensor,
        position: int | Inputs,
        tokens: torch.Tensor,
        q: Distribution | None = None,
    ) -> Verified:
        inputs = self._at(logits, position)
        own, numbers = self._choose(self.adjust(logits, inputs, tokens), inputs)
        finite = numbers.isfinite().flatten(own.dim() - 1).all(-1)
        return Verified(own, right_prefix(own[..., :-1] == tokens), finite)


class Greedy(Choosing):
    """The most likely token; the lowest id in a tie."""

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return type(self), *self._rules

    def _choose(self, logits: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        # `max` is several times faster than `argmax` on a CPU, and it returns NaN if there is one.
        values, own = logits.max(-1)
        return own, values


class Rejection(Sampler):
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318) with block
    verification (Sun et al. 2024, arXiv 2403.10444).

    A proposal of one token x is accepted with probability min(1, p(x) / q(x)). On rejection the token is drawn from the
    normalised residual max(0, p - q); if all proposals are accepted, one more token is drawn from p. Block verification
    accepts several tokens jointly: a token with p < q can be compensated by an earlier one with p > q. The text has the
    target's distribution for every drafter. More tokens are accepted than token by token: on the embedded pair at
    temperature 0.8, 0.15 more per round of 4 proposals and 0.57 more per round of 7.

    Random numbers are functions of the seed, the round's first position, and the place in the round. Later rounds use
    new numbers, since acceptance depends on all proposals of a round, also on those after the first rejected one.
    """

    def start_round(self, position: int) -> None:
        self.round = position

    def waits(self, device: torch.device) -> bool:
        """Whether the random numbers of this round are not computed yet."""
        return self.seed is not None and self.tables.get(device, (None,))[0] != self.round

    def _noise(self, device: torch.device, position: int, rows: int) -> torch.Tensor:
        if self.seed is None:
            return torch.rand(rows, NUMBERS, device=device).clamp(max=1 - 2.0**-23)
        begin = position if self.round is None else self.round
        count = max(position - begin + rows, ROUND_ROWS)
        found = self.tables.get(device)
        if found is None or found[0] != begin or found[1].size(0) < count:
            keys = position_keys(self.seed, torch.tensor([begin], device=device))
            found = self.tables[device] = begin, uniform_noise(keys, count * NUMBERS).view(count, NUMBERS)
        return found[1][position - begin : position - begin + rows]

    @staticmethod
    def _draw(weights: Distribution, uniform: torch.Tensor) -> torch.Tensor:
        """Draws one token from each row by inversion; rows need not sum to 1; `uniform` is (..., R)."""
        below = weights.probs.cumsum(-1)
        column = (below <= uniform.unsqueeze(-1) * below[..., -1:]).sum(-1)
        return column if weights.ids is None else weights.ids.gather(-1, column.unsqueeze(-1)).squeeze(-1)

    def draw(self, logits: torch.Tensor, position: int | Inputs) -> tuple[torch.Tensor, Distribution]:
        inputs = self._at(logits, position)
        distribution = processed(self._adjust_draft(logits, inputs), self.sampling)
        return self._draw(distribution, inputs.noise[..., 0]), distribution

    def verify(
        self,
        logits: torch.Tensor,
        position: int | Inputs,
        tokens: torch.Tensor,
        q: Distribution | None = None,
    ) -> Verified:
        m = tokens.size(-1)
        inputs = self._at(logits, position)
        p = processed(self.adjust(logits, inputs, tokens), self.sampling)
        noise = inputs.noise
        finite = p.probs.isfinite().flatten(-2).all(-1)
        if m == 0:
            return Verified(self._draw(p, noise[..., 2]), torch.zeros_like(finite, dtype=torch.int64), finite)

        # Row i of p and q is for proposal i, or for the target's own token in its place.
        proposed = tokens >= 0
        x = tokens.clamp_min(0)
        p_rows = p.first(m)
        p_x = p_rows.of(x)
        q_x = torch.ones_like(p_x) if q is None else q.of(x)
        if q is not None:
            finite = finite & q.probs.isfinite().flatten(-2).all(-1)

        # kept[i]: probability that the first i proposals are accepted jointly: min(1, kept[i - 1] * p / q).
        # In logarithms this is the cumulative sum minus its running maximum.
        # The clamp rejects a token with p = 0 even if the drafter reports q = 0 for it.
        sums = (p_x / q_x.clamp_min(torch.finfo(q_x.dtype).tiny)).log().cumsum(-1)
        kept = F.pad((sums - sums.clamp_min(0).cummax(-1).values).exp() * proposed, (1, 0), value=1.0)
        # Residual for the target's own token in place of proposal i, if those before it are accepted.
        if q is None:
            ids = torch.arange(p_rows.probs.size(-1), device=x.device) if p_rows.ids is None else p_rows.ids
            q_rows = (ids == x.unsqueeze(-1)).to(p_rows.probs.dtype)
        else:
            q_rows = q.at(p_rows)
        residual = (kept[..., :m].unsqueeze(-1) * p_rows.probs - q_rows).clamp_min(0)
        left = residual.sum(-1)
        # share[i - 1]: probability that exactly the first i proposals are accepted, given that no longer prefix was. It
        # is kept[i] for the last proposal.
        share = left[..., 1:] / (left[..., 1:] + 1 - kept[..., 1:m])
        share = torch.where(share.isnan(), 1.0, share)
        last = proposed & ~F.pad(proposed[..., 1:], (0, 1))
        share = torch.where(last, kept[..., 1:], F.pad(share, (0, 1))) * proposed
        places = torch.arange(m + 1, device=tokens.device)
        accepted = ((noise[..., :m, 1] < share) * places[1:]).amax(-1)

        # The distribution after the accepted prefix: the residual, or p if all proposals were accepted, or if p and q
        # are equal up to rounding so that the residual is 0.
        own = p.row(accepted)
        residual_row = row_of(F.pad(residual * (left > 0).unsqueeze(-1), (0, 0, 0, 1)), accepted)
        use = (accepted < proposed.sum(-1)) & (residual_row.flatten(-2).sum(-1) > 0)
        own = Distribution(torch.where(use[..., None, None], residual_row, own.probs), own.ids)
        token = self._draw(own, noise[..., 2].gather(-1, accepted.unsqueeze(-1)))
        chosen = torch.where(places < accepted.unsqueeze(-1), F.pad(tokens, (0, 1)), token)
        return Verified(chosen, accepted, finite)


class Coupled(Choosing):
    """Gumbel sampling with noise shared by target and drafter (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    The noise of a token is a function of seed, position and token id only. Target and drafter both take
    argmax(log p + noise); a proposal is accepted iff it equals the target's choice. So the text is a function of
    target, prompt, seed and settings, and does not depend on drafter and k.
    """

    def _numbers(self, positions: torch.Tensor) -> torch.Tensor:
        return position_keys(self.seed or 0, positions)

    def _choose(self, logits: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        p = processed(logits, self.sampling)
        ids = torch.arange(p.probs.size(-1), device=p.probs.device) if p.ids is None else p.ids
        scores = p.probs.log() + gumbel_noise(inputs.noise, ids)
        values, columns = scores.max(-1)
        if p.ids is not None:
            # The lowest id wins a tie, for every order of the candidates. The comparison is written so that a NaN still
            # gives a valid id, since a drafter feeds the token to its model before `finite` is checked.
            ties = torch.where(scores < values.unsqueeze(-1), torch.iinfo(torch.int64).max, p.ids)
            columns = ties.min(-1).values
        return columns, p.probs


def make_sampler(
    sampling: Sampling,
    *,
    seed: int,
    banned: Sequence[int] = (),
    banned_until: int = 0,
    processor: LogitsProcessor | None = None,
    logprobs: Logprobs | None = None,
) -> Sampler:
    """Makes the sampler for one text.

    Args:
        sampling: The settings; temperature 0 or top_p 0 is greedy with either sampler.
        seed: Seed of this text: any integer; its lowest 64 bits are used.
        banned: Token ids that have probability 0 before position `banned_until`.
        banned_until: First position at which `banned` is not applied.
        processor: Processes the text's logits; None for no processing.
        logprobs: Log-probabilities to return with the tokens; None for none.
    """
    sampled: type[Sampler] = Coupled if sampling.sampler == "coupled" else Rejection
    return (Greedy if sampling.greedy else sampled)(sampling, banned, banned_until, seed, processor, logprobs)
