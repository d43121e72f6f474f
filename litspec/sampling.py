"""From logits to tokens: processed distributions, three samplers, and their rules of acceptance.

Shapes: R rows of logits, V ids in the (padded) vocabulary, K candidates that are left of them, m proposals.

All of it stays on the device: nothing here reads a value to the host. Arithmetic is in float32 whatever the logits'
type.
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
from litspec.noise import MASK, gumbel_noise, lowbias32
from litspec.types import SamplerName

# Of the first row: a number, or (1,) in a compiled graph.
Position = int | torch.Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits, applied in LitGPT's order: top-k, temperature, top-p.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Only the k most likely tokens; None for all.
        top_p: Only the most likely tokens that together hold this probability; 0 is greedy, 1 keeps all.
        sampler: "rejection" keeps most proposals; "coupled" makes the text independent of drafter and k.

    Raises:
        InputError: For a value of another type or outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    sampler: SamplerName = "rejection"

    def __post_init__(self) -> None:
        for name, hint in hints_of(Sampling).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))
        check_sampling(self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> bool:
        # Below float32's range a temperature is 0.
        return self.temperature < torch.finfo(torch.float32).tiny or self.top_p == 0


class Distribution(NamedTuple):
    """R distributions over tokens.

    Attributes:
        probs: (R, K) float32, each row sums to 1.
        ids: (R, K) int64, the token of each column; None where column j is token j (K = V).
    """

    probs: torch.Tensor
    ids: torch.Tensor | None = None

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The probability of one token per row: (R,) -> (R,)."""
        if self.ids is None:
            return self.probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return (self.probs * (self.ids == tokens.unsqueeze(1))).sum(1)

    def row(self, index: torch.Tensor) -> Distribution:
        """One row, chosen on the device: index (1,)."""
        return Distribution(
            self.probs.index_select(0, index), None if self.ids is None else self.ids.index_select(0, index)
        )

    def first(self, m: int) -> Distribution:
        """The first m rows."""
        return Distribution(self.probs[:m], None if self.ids is None else self.ids[:m])

    def at(self, other: Distribution) -> torch.Tensor:
        """These probabilities at the candidates of `other`, row by row: (R, K of other)."""
        if other.ids is None:
            size = other.probs.size(1)
            if self.ids is not None:
                return torch.zeros_like(other.probs).scatter_add_(1, self.ids, self.probs)
            return F.pad(self.probs, (0, size - self.probs.size(1)))
        if self.ids is not None:
            return ((other.ids.unsqueeze(2) == self.ids.unsqueeze(1)) * self.probs.unsqueeze(1)).sum(2)
        return F.pad(self.probs, (0, 1)).gather(1, other.ids.clamp(max=self.probs.size(1)))


def concatenate(rows: Sequence[Distribution]) -> Distribution:
    """Puts the rows of several distributions, made with the same settings, one below the other."""
    ids = [row.ids for row in rows if row.ids is not None]
    return Distribution(torch.cat([row.probs for row in rows]), torch.cat(ids) if ids else None)


def processed(logits: torch.Tensor, sampling: Sampling) -> Distribution:
    """Softmax after top-k, temperature and top-p.

    Args:
        logits: (R, V). An entry of -inf is a token of probability 0.
        sampling: Not greedy.

    Returns:
        Sparse (K = top_k, most likely first) where top_k cuts anything, else dense. What follows then works on the
        survivors only, which costs next to nothing.
    """
    values, ids = logits.float(), None
    if sampling.top_k is not None and sampling.top_k < logits.size(-1):
        values, ids = torch.topk(values, sampling.top_k)
    if sampling.temperature != 1:
        # The greatest first becomes 0: a low temperature would make it inf.
        values = (values - values.amax(-1, keepdim=True)) / sampling.temperature
    probs = F.softmax(values, dim=-1)
    if sampling.top_p < 1:
        # Keep a token iff it and all less likely ones hold more than 1 - top_p; the most likely one is always kept.
        descending, order = (probs, None) if ids is not None else torch.sort(probs, dim=-1, descending=True)
        keep = descending.flip(-1).cumsum(-1).flip(-1) > 1 - sampling.top_p
        keep[:, 0] = True
        if order is not None:
            keep = keep.scatter(1, order, keep)
        probs = probs * keep
        probs = probs / probs.sum(-1, keepdim=True)
    return Distribution(probs, ids)


class Verified(NamedTuple):
    """The outcome of one verification, still on the device.

    Attributes:
        tokens: (m + 1,) int64; the first `accepted + 1` are to be committed.
        accepted: () int64, the length of the longest right prefix of the proposal.
        finite: () bool, whether all logits and proposal probabilities were numbers.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    finite: torch.Tensor


class Inputs(NamedTuple):
    """What a choice depends on beside logits and settings, as tensors: a compiled graph then serves every text.

    Attributes:
        banned_until: (1,) int64.
        key: Of the coupled sampler, (2,) int64: the seed's lowest 32 bits, and those above.
        uniform: Of the rejection sampler, (rows - 1,) in [0, 1).
        clocks: The same, (draws, K) exponential.
    """

    banned_until: torch.Tensor
    key: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    clocks: torch.Tensor | None = None

    def draw(self, i: int) -> Inputs:
        """Those of the i-th of several draws."""
        return self if self.clocks is None else self._replace(clocks=self.clocks[i : i + 1])


class Sampler:
    """Chooses tokens, for target and drafter alike.

    Args:
        sampling: The settings.
        banned: Token ids that have probability 0 ...
        banned_until: ... at positions before this one.
    """

    def __init__(self, sampling: Sampling, banned: Sequence[int] = (), banned_until: int = 0) -> None:
        self.sampling = sampling
        self._banned = list(banned)
        self._banned_until = banned_until if self._banned else 0
        self._constants: dict[torch.device, Inputs] = {}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a compiled graph of `draw` or `verify` depends on: equal for texts that may share it."""
        return type(self), self.sampling, tuple(self._banned)

    def inputs(self, device: torch.device, *, rows: int = 1, draws: int = 1, columns: int = 0) -> Inputs:
        """What the text's next choice depends on, to be handed to `draw` or `verify`.

        Args:
            device: Where the logits are.
            rows: Rows that `verify` will be given.
            draws: How often something is drawn.
            columns: K, candidates of a row.
        """
        if device not in self._constants:
            self._constants[device] = Inputs(torch.tensor([self._banned_until], device=device), self._key(device))
        return self._constants[device]

    def _key(self, device: torch.device) -> torch.Tensor | None:
        return None

    def on(self, device: torch.device) -> Sampler:
        """The same sampler for logits on another device than the target's."""
        return self

    def draw(
        self, logits: torch.Tensor, position: Position, inputs: Inputs | None = None
    ) -> tuple[torch.Tensor, Distribution | None]:
        """One token from one row.

        Args:
            logits: (1, V), of whatever model.
            position: Where the token will stand.
            inputs: Where the sampler is not to use its own: in a compiled graph.

        Returns:
            The token, (1,) int64, and the distribution to report with it, the one it was drawn from; None where
            `verify` of the same sampler asks for none.
        """
        raise NotImplementedError

    def verify(
        self,
        logits: torch.Tensor,
        position: Position,
        tokens: torch.Tensor,
        q: Distribution | None = None,
        inputs: Inputs | None = None,
    ) -> Verified:
        """Accepts the longest right prefix of a proposal and adds one token of the target's own.

        Args:
            logits: (m + 1, V), the target's; row i stands for the token at `position + i`.
            position: Where the first proposal stands.
            tokens: (m,) int64, the proposal; m = 0 is a plain step. It may end in -1: nothing was proposed there.
            q: m rows, the processed distributions that the proposal was drawn from; None where it was not drawn.
            inputs: Where the sampler is not to use its own: in a compiled graph.
        """
        raise NotImplementedError

    def ban(self, logits: torch.Tensor, position: Position, inputs: Inputs | None = None) -> torch.Tensor:
        """Takes the banned ids out of the rows before `banned_until`; row i stands for the token at `position + i`."""
        if inputs is not None and self._banned:
            ids = torch.arange(logits.size(1), device=logits.device)
            hidden = functools.reduce(torch.logical_or, [ids == i for i in self._banned])
            early = torch.arange(logits.size(0), device=logits.device) + position < inputs.banned_until
            return torch.where(early.unsqueeze(1) & hidden, float("-inf"), logits)
        if inputs is None and (rows := self._banned_until - position) > 0:
            logits = logits.clone()
            logits[:rows, [i for i in self._banned if i < logits.size(-1)]] = float("-inf")
        return logits


def right_prefix(right: torch.Tensor) -> torch.Tensor:
    """The number of True before the first False: (m,) -> ()."""
    return right.cumprod(0).sum()


class Choosing(Sampler):
    """A sampler whose token follows from logits and position: a proposal is accepted iff it is the same."""

    def _choose(
        self, logits: torch.Tensor, position: Position, inputs: Inputs | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice of each row of logits without banned ids, (R,), and numbers that are finite iff all logits are."""
        raise NotImplementedError

    def draw(self, logits: torch.Tensor, position: Position, inputs: Inputs | None = None) -> tuple[torch.Tensor, None]:
        return self._choose(self.ban(logits, position, inputs), position, inputs)[0], None

    def verify(
        self,
        logits: torch.Tensor,
        position: Position,
        tokens: torch.Tensor,
        q: Distribution | None = None,
        inputs: Inputs | None = None,
    ) -> Verified:
        own, numbers = self._choose(self.ban(logits, position, inputs), position, inputs)
        return Verified(own, right_prefix(own[:-1] == tokens), numbers.isfinite().all())


class Greedy(Choosing):
    """The most likely token; the lowest id where several are."""

    @property
    def kind(self) -> tuple[Any, ...]:
        return type(self), tuple(self._banned)

    def _choose(
        self, logits: torch.Tensor, position: Position, inputs: Inputs | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # `max` finds the index several times faster than `argmax` on a CPU, and a NaN is its greatest value.
        values, own = logits.max(-1)
        return own, values


class Rejection(Sampler):
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    A proposal x is accepted with probability min(1, p(x) / q(x)); on rejection the token is drawn from the residual
    max(0, p - q), normalised; after m accepted ones a further token is drawn from p. The text has the target's own
    distribution, whatever the drafter.

    Args:
        generator: Source of randomness, on the logits' device; None for torch's global one.
    """

    def __init__(
        self,
        sampling: Sampling,
        banned: Sequence[int] = (),
        banned_until: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(sampling, banned, banned_until)
        self._generator = generator

    def inputs(self, device: torch.device, *, rows: int = 1, draws: int = 1, columns: int = 0) -> Inputs:
        constants = super().inputs(device)
        uniform = torch.rand(rows - 1, generator=self._generator, device=device)
        clocks = torch.empty(draws, columns, device=device).exponential_(generator=self._generator)
        return constants._replace(uniform=uniform, clocks=clocks)

    def on(self, device: torch.device) -> Sampler:
        seed = torch.initial_seed() if self._generator is None else self._generator.initial_seed()
        generator = torch.Generator(device).manual_seed((seed + 1) & 0x7FFFFFFFFFFFFFFF)
        return Rejection(self.sampling, self._banned, self._banned_until, generator)

    def _draw(self, weights: Distribution, inputs: Inputs | None) -> torch.Tensor:
        """One token from one row, which need not sum to 1: the first of K exponential clocks to ring."""
        if inputs is None:
            clocks = torch.empty_like(weights.probs).exponential_(generator=self._generator)
        else:
            clocks = inputs.clocks
        column = (weights.probs / clocks.clamp_min(torch.finfo(clocks.dtype).tiny)).max(-1).indices
        return column if weights.ids is None else weights.ids[0].gather(0, column)

    def draw(
        self, logits: torch.Tensor, position: Position, inputs: Inputs | None = None
    ) -> tuple[torch.Tensor, Distribution]:
        distribution = processed(self.ban(logits, position, inputs), self.sampling)
        return self._draw(distribution, inputs), distribution

    def verify(
        self,
        logits: torch.Tensor,
        position: Position,
        tokens: torch.Tensor,
        q: Distribution | None = None,
        inputs: Inputs | None = None,
    ) -> Verified:
        m = tokens.size(0)
        p = processed(self.ban(logits, position, inputs), self.sampling)
        finite = p.probs.isfinite().all()
        if m == 0:
            return Verified(self._draw(p, inputs), torch.zeros((), dtype=torch.int64, device=tokens.device), finite)

        proposed = tokens >= 0
        x = tokens.clamp_min(0)
        p_x = p.first(m).of(x)
        q_x = torch.ones_like(p_x) if q is None else q.of(x)
        uniform = torch.rand(m, generator=self._generator, device=p_x.device) if inputs is None else inputs.uniform
        accepted = right_prefix((uniform * q_x < p_x) & proposed)

        # The row behind the accepted prefix, and the proposal's distribution there; none is left behind the last.
        p_n = p.row(accepted.view(1))
        last = accepted.clamp(max=m - 1).view(1)
        if q is None:
            x = tokens.index_select(0, last)
            candidates = torch.arange(p_n.probs.size(1), device=x.device) if p_n.ids is None else p_n.ids
            q_n = (candidates == x).to(p_n.probs.dtype).view_as(p_n.probs)
        else:
            q_n = q.row(last).at(p_n)
            finite = finite & q.probs.isfinite().all()
        residual = (p_n.probs - q_n * (accepted < proposed.sum())).clamp_min(0)
        # Where p and q are equal up to rounding nothing is left over; then p itself is the limit.
        residual = torch.where(residual.sum() > 0, residual, p_n.probs)
        own = self._draw(Distribution(residual, p_n.ids), inputs)

        places = torch.arange(m + 1, device=tokens.device)
        return Verified(torch.where(places < accepted, F.pad(tokens, (0, 1)), own), accepted, finite)


class Coupled(Choosing):
    """Gumbel sampling with noise shared by target and drafter (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    The noise of a token is a function of seed, position and token id alone. Target and drafter both take
    argmax(log p + noise); a proposal is accepted iff it is the target's own choice. So the text is a function of
    target, prompt, seed and settings: no drafter and no k can change it.

    Args:
        seed: Any integer; its lowest 64 bits count.
    """

    def __init__(self, sampling: Sampling, banned: Sequence[int] = (), banned_until: int = 0, seed: int = 0) -> None:
        super().__init__(sampling, banned, banned_until)
        self._seed = seed

    def _key(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self._seed & MASK, self._seed >> 32 & MASK], device=device)

    def _choose(
        self, logits: torch.Tensor, position: Position, inputs: Inputs | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p = processed(logits, self.sampling)
        ids = torch.arange(p.probs.size(1), device=p.probs.device).unsqueeze(0) if p.ids is None else p.ids
        positions = torch.arange(logits.size(0), device=p.probs.device) + position
        scores = p.probs.log() + gumbel_noise(self._seed if inputs is None else inputs.key, positions, ids)
        values, columns = scores.max(-1)
        if p.ids is not None:
            # The lowest id wins a tie, in whatever order top-k left the candidates. Asked this way round, NaN leaves an
            # id that exists: a drafter feeds it to its model before anybody looks at `finite`.
            ties = torch.where(scores < values.unsqueeze(1), torch.iinfo(torch.int64).max, p.ids)
            columns = ties.min(-1).values
        return columns, p.probs


def make_sampler(
    sampling: Sampling,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    banned: Sequence[int] = (),
    banned_until: int = 0,
) -> Sampler:
    """The sampler for one text.

    Args:
        sampling: The settings; temperature 0 or top_p 0 is greedy with either sampler.
        seed: Of this text; any integer, its lowest 64 bits count.
        device: Where the logits are.
        banned: Ids of probability 0 ...
        banned_until: ... at positions before this one.
    """
    if sampling.greedy:
        return Greedy(sampling, banned, banned_until)
    if sampling.sampler == "coupled":
        return Coupled(sampling, banned, banned_until, seed)
    # A CPU generator looks at 32 bits of its seed only.
    generator = torch.Generator(device).manual_seed(seed & MASK ^ lowbias32(seed >> 32 & MASK))
    return Rejection(sampling, banned, banned_until, generator)
