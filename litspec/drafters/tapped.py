"""Shared code of drafters that read the target's states and have layers with their own keys and values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from litgpt.config import Config
from torch import Tensor, nn

from litspec.drafters.autoregressive import EXACT_ROWS, MOST_ROWS, exact_rows
from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.engine.rows import class_limit
from litspec.engine.target import PREFILL_CHUNK, neighbours
from litspec.errors import InputError
from litspec.model import GPT, KVCache
from litspec.model.gpt import Block
from litspec.model.kv_cache import kv_bucket
from litspec.model.norm import RMSNormFunction
from litspec.sampling import Distribution, Inputs, Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession

# Tokens of a prompt that run in one forward. The chunks are the target's, for every split of the prompt, so that target
# and drafter can reuse the same prefix for the next prompt.
CHUNK = PREFILL_CHUNK
# A head can propose any number of tokens, but later ones are rarely right.
MAX_K = 15
# Up to this many pending rows of a text run together with those of other texts; longer ones run alone.
WAITING = 16
# Row counts per text that are measured for steps whose bits matter. A single row would be cheaper, but its products
# differ from those of several rows, in bfloat16 so rarely (one number of 30,000) that no trial would show it.
STEP_ROWS = (2, EXACT_ROWS)
# The most texts of a forward whose bits matter.
EXACT_TEXTS = 16
# Positions after a text for drafted rows and padding, twice, since idle slots write to the end of the buffer.
OVERHANG = 2 * (WAITING + MAX_K)


class Places(NamedTuple):
    """Positions at which the rows of some neighbouring slots begin.

    Attributes:
        first: The positions, `(N,)`.
        longest: The largest position of a slot with a text.
    """

    first: Tensor
    longest: int

    def after(self, rows: int) -> Places:
        """The positions shifted by `rows`."""
        return Places(self.first + rows, self.longest + rows)


class Layers(GPT):
    """Decoder layers: a GPT whose embedding and head are not used.

    Args:
        config: Config of the layers, with a vocabulary of one.
        blocks: The layers; None to build them from the config.
    """

    def __init__(self, config: Config, blocks: list[nn.Module] | None = None) -> None:
        super().__init__(config)
        if blocks is not None:
            self.transformer.h = cast(Sequence[Block], nn.ModuleList(blocks))
            self.bind()

    def run(self, layer: int, x: Tensor, places: Places, cache: KVCache, exact: bool = False) -> Tensor:
        """Runs rows `x` `(N * W, C)` of all sequences through one layer; their K/V are written from `places` on."""
        width = x.size(0) // places.first.size(0)
        step = self._step(cache, places.first, width, cache.bucket(places.longest + width), exact=exact)
        return self._blocks[layer](x, step, cache.k[layer], cache.v[layer])


def load_layers(
    make: Callable[[], Layers], weights: Mapping[str, Tensor], folder: Path, like: Tensor
) -> tuple[Layers, int]:
    """Builds layers and loads their weights without a second copy.

    Args:
        make: Builds the layers; called on the meta device.
        weights: Weights by the layers' names, `transformer.h.0.` and so on.
        folder: For messages.
        like: A tensor of the device and dtype to use.

    Returns:
        The layers, and the bytes of their weights.

    Raises:
        InputError: A weight is missing or has a wrong shape.
    """
    with torch.device("meta"):
        layers = make().eval().requires_grad_(False)
    state, size = {}, 0
    for name, old in layers.state_dict().items():
        if not name.startswith("transformer.h."):
            state[name] = torch.zeros(old.shape, dtype=like.dtype, device=like.device)
            continue
        if name not in weights:
            raise InputError(f"The weights in {str(folder)!r} lack the one named {name!r} in LitGPT.")
        new = weights[name]
        if new.shape != old.shape:
            raise InputError(
                f"A weight in {str(folder)!r} does not fit its config.json: {name!r} in LitGPT's names has shape "
                f"{tuple(new.shape)}, but the config requires {tuple(old.shape)}."
            )
        state[name] = new.to(like.device, like.dtype)
        size += state[name].numel() * state[name].element_size()
    layers.load_state_dict(state, assign=True)
    return layers.requires_grad_(False), size


def linear(weight: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """A linear layer without bias, as a function of rows."""
    return partial(torch.mm, mat2=weight.to(like.device, like.dtype).t())


def norm(weight: Tensor, eps: float, like: Tensor) -> RMSNormFunction:
    """An RMS norm, as a function of rows."""
    return RMSNormFunction(weight.to(like.device, like.dtype), eps)


def embedding_of(model: GPT) -> nn.Embedding:
    """A model's embedding, without the scale that some models apply to it."""
    return model.transformer.wte


def head_bytes(model: GPT) -> int:
    """Bytes of a model's output head."""
    return sum(p.numel() * p.element_size() for p in model.lm_head.parameters())


def head_logits(model: GPT, x: Tensor) -> Tensor:
    """Logits `(N, V)` of a model's output head for normed rows."""
    logits: Tensor = model.lm_head(x)
    cap = model.config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


Drawn = tuple[Tensor, Distribution | None]


def stacked(drawn: Sequence[Drawn]) -> Drawn:
    """Stacks k draws for N texts: tokens `(N, k)`, and distributions with k rows per text."""
    q = [each for _, each in drawn if each is not None]
    tokens = torch.stack([token for token, _ in drawn], 1)
    if not q:
        return tokens, None
    ids = [each.ids for each in q if each.ids is not None]
    return tokens, Distribution(torch.stack([each.probs for each in q], 1), torch.stack(ids, 1) if ids else None)


def proposals(drawn: Drawn, k: Sequence[int]) -> list[Proposal]:
    """Splits draws for several texts into proposals, with the first k tokens of each text."""
    tokens, q = drawn
    found = []
    for i, own in enumerate(k):
        given = None
        if q is not None:
            given = Distribution(q.probs[i], None if q.ids is None else q.ids[i]).first(own)
        found.append(Proposal(tokens[i, :own], given))
    return found


class Pending:
    """Committed tokens and states that a session has not run yet.

    Row p pairs the state at position p with the token after it, so the text's first token has no row.

    Attributes:
        tokens: One token per row.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._hidden: list[Tensor] = []

    def add(self, tokens: list[int], input_pos: int, hidden: Tensor | None) -> None:
        """Adds the arguments of `DraftSession.commit`. Call `keep` after taking full chunks."""
        if hidden is None:
            raise ValueError("commit needs the target's states for a drafter with taps")
        skip = 1 if input_pos == 0 else 0
        self.tokens += tokens[skip:]
        if len(tokens) > skip:
            self._hidden.append(hidden[skip : len(tokens)])

    def take(self, size: int) -> tuple[list[int], Tensor]:
        """Removes the first rows and returns their tokens and states `(size, taps * C)`."""
        hidden = self._hidden[0] if len(self._hidden) == 1 else torch.cat(self._hidden)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        self._hidden = [hidden[size:]] if self.tokens else []
        return tokens, hidden[:size]

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self) -> None:
        """Copies the remaining states that were added last, since their larger tensor may be overwritten."""
        if self._hidden:
            self._hidden[-1] = self._hidden[-1].clone()


class Pool:
    """A drafter's data for all slots of an engine.

    Attributes:
        cache: Keys and values, `(B, G, S, D)` per layer.
        prompts: By slot, the tokens at its beginning that were read as whole chunks of a prompt.
        carried: By slot, the other session state after each of these chunks.
    """

    def __init__(self, cache: KVCache) -> None:
        count = cache.shape[0]
        self.cache = cache
        self.prompts: list[list[int]] = [[] for _ in range(count)]
        self.carried: list[list[Any]] = [[] for _ in range(count)]

    def shared(self, number: int, prompt: Sequence[int], most: int) -> int:
        """Tokens at the beginning of a prompt that a slot holds: whole chunks, at most `most` tokens."""
        known = self.prompts[number]
        end = min(len(known), most) // CHUNK * CHUNK
        while known[:end] != list(prompt[:end]):
            end -= CHUNK
        return end

    def open(self, number: int, held: int = 0, origin: int = 0) -> None:
        """Begins a text in a slot, with the first `held` tokens copied from slot `origin`.

        All later entries are zeroed, since the attention mask does not remove a NaN of an earlier text.
        """
        rows = max(0, held - 1)  # the last row needs the token after it
        prompt, carried = self.prompts[origin][:held], self.carried[origin][: held // CHUNK]
        # Cleared first, so that an interrupted copy leaves an empty slot.
        self.prompts[number], self.carried[number] = [], []
        if number != origin and rows:
            self.cache.sequences(number, number + 1).copy_from(self.cache.sequences(origin, origin + 1), rows)
        self.prompts[number], self.carried[number] = prompt, carried
        for buffer in (*self.cache.k, *self.cache.v):
            buffer[number, :, rows:] = 0


class TappedDrafter(Drafter):
    """A drafter that reads the target's states and keeps its own keys and values for all slots of an engine."""

    @property
    @abstractmethod
    def block_size(self) -> int | None:
        """Context length in tokens; None for no limit."""

    @abstractmethod
    def make_cache(self, target: TargetSession, length: int, count: int) -> KVCache:
        """A K/V cache for `count` slots with texts of up to `length` tokens."""

    @abstractmethod
    def absorb(self, sessions: Sequence[Any], sizes: Sequence[int], members: range, width: int | None) -> None:
        """Runs the first pending rows of some sessions on the target's states. The rows become final.

        Args:
            sessions: The sessions, ordered by slot number.
            sizes: Rows per session, at least 1.
            members: The slots that run.
            width: Rows that each text is filled up to if bits matter; None: as many as needed.
        """

    @abstractmethod
    def draft(
        self,
        sessions: Sequence[Any],
        tokens: Sequence[int],
        k: Sequence[int],
        members: range,
        exact: int | None,
    ) -> list[Proposal]:
        """Drafts for sessions without pending rows, whose samplers have equal `batch_key`s.

        Args:
            sessions: The sessions, ordered by slot number.
            tokens: The last committed token of each session.
            k: Tokens to draft per session, at least 1.
            members: The slots that run.
            exact: Rows of each text in a step, see `step_rows`; None if bits do not matter.
        """

    @abstractmethod
    def try_rows(
        self, target: TargetSession, ids: Tensor, states: Tensor, places: Places, cache: KVCache
    ) -> list[Tensor]:
        """Results of rows in all layers and the head, each `(B * n, ...)`, to compare their bits.

        Args:
            target: The target's session.
            ids: `(B, n)`.
            states: The target's, `(B, n, taps * C)`.
            places: Where the rows stand in each sequence.
            cache: Of these sequences.
        """

    @property
    def exact(self) -> Sequence[int]:
        """Row counts per text of a step whose bits matter, the cheapest first."""
        return STEP_ROWS

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows per text in the widest forward of `draft`."""

    @cached_property
    def _most_texts(self) -> WeakKeyDictionary[GPT, dict[int, int]]:
        """Measured limits, by target and row count per text."""
        return WeakKeyDictionary()

    def most_texts(self, target: TargetSession, rows: int) -> int:
        """The most texts of `rows` rows each that keep their bits in one forward; measured once."""
        found = self._most_texts.setdefault(target.model, {})
        if rows not in found:
            found[rows] = max(1, self.row_limit(target, rows) // rows)
        return found[rows]

    def row_limit(self, target: TargetSession, rows: int) -> int:
        """The most rows in total that keep their bits in one forward, with `rows` rows per text."""
        return class_limit(Tried(self, target), (rows,), min(EXACT_TEXTS * rows, MOST_ROWS))

    def step_rows(self, target: TargetSession) -> int | None:
        """The row count per text with which the most texts keep their bits in a step; None if no two do."""
        most, found = 1, None
        for rows in self.exact:
            if (texts := self.most_texts(target, rows)) > most:
                most, found = texts, rows
            if most >= EXACT_TEXTS:
                break
        return found

    def limit(self, max_length: int) -> int:
        """Most positions of a text, limited by the drafter's context."""
        return max_length if self.block_size is None else min(max_length, self.block_size)

    def pool(self, target: TargetSession) -> Pool:
        """The drafter's data for all slots of the target's engine; allocated at the first call."""
        if self not in target.shared:
            cache = self.make_cache(target, self.limit(target.max_length), target.whole.shape[0])
            target.shared[self] = Pool(cache)
        pool: Pool = target.shared[self]
        return pool

    def reserve(self, target: TargetSession) -> None:
        self.pool(target)

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> list[Proposal]:
        """Drafts for all texts in one forward per step.

        With the rejection sampler a text depends on the drafts' bits, which must be the same alone and in a batch. Then
        only row counts are used whose bits were measured to be equal. If there are none, these texts are drafted one by
        one.
        """
        own = [session for session in sessions if isinstance(session, TappedSession)]
        found = [Proposal(torch.empty(0, dtype=torch.int64, device=session.device)) for session in own]
        wanted = [min(most, self.max_k, each.limit - place) for each, place, most in zip(own, input_pos, k)]
        together: dict[tuple[Hashable, int | None, int | None], list[int]] = {}
        for i, session in enumerate(own):
            session.check(input_pos[i])
            if wanted[i] > 0 and (len(session.pending) or session.filled):
                counts = exact_rows(session.sampler) is not None
                exact = self.step_rows(session.target) if counts else None
                alone = i if counts and exact is None else None
                together.setdefault((session.sampler.batch_key, exact, alone), []).append(i)
        for (_, exact, _), members in together.items():
            members.sort(key=lambda i: own[i].number)
            most = MOST_ROWS // self.rows if exact is None else self.most_texts(own[members[0]].target, exact)
            for part in neighbours([own[i].number for i in members], max(1, most)):
                chosen = [i for i in members if own[i].number in part]
                some = [own[i] for i in chosen]
                self._absorb_waiting(some, exact is not None)
                drafted = self.draft(some, [tokens[i] for i in chosen], [wanted[i] for i in chosen], part, exact)
                for i, proposal in zip(chosen, drafted):
                    found[i] = proposal
        return found

    def _absorb_waiting(self, sessions: Sequence[TappedSession], exact: bool) -> None:
        for session in sessions:
            if len(session.pending) > WAITING:
                session.absorb(len(session.pending))
        by_width: dict[int | None, list[TappedSession]] = {}
        for session in sessions:
            if len(session.pending):
                width = -(-len(session.pending) // EXACT_ROWS) * EXACT_ROWS if exact else None
                by_width.setdefault(width, []).append(session)
        for width, waiting in by_width.items():
            most = MOST_ROWS if width is None else self.most_texts(waiting[0].target, width)
            for part in neighbours([session.number for session in waiting], most):
                some = [session for session in waiting if session.number in part]
                self.absorb(some, [len(session.pending) for session in some], part, width)


class Tried:
    """A drafter's layers over random states, see `engine.rows.Layers`."""

    def __init__(self, drafter: TappedDrafter, target: TargetSession) -> None:
        self._drafter = drafter
        self._target = target
        self.block_size = drafter.limit(target.config.block_size)
        self.vocab_size = target.config.vocab_size

    def make_cache(self, length: int, width: int, batch_size: int) -> KVCache:
        cache = self._drafter.make_cache(self._target, length, batch_size)  # which has room for blocks
        self._make_states(cache.size)
        return cache

    def _make_states(self, count: int) -> None:
        shape = count, len(self._drafter.taps) * self._target.config.n_embd
        states = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self._states = states.to(embedding_of(self._target.model).weight)

    def run(self, ids: Tensor, first: Sequence[int], cache: KVCache, logits: bool) -> list[Tensor]:
        places = Places(torch.tensor(first, device=ids.device), max(first))
        states = self._states[places.first.unsqueeze(1) + cache.slots[: ids.size(1)]]
        return self._drafter.try_rows(self._target, ids, states, places, cache)


class TappedSession(DraftSession):
    """One text of a `TappedDrafter`, see `drafters.DraftSession`.

    Final keys and values come only from the target's states. Drafts write after them and are overwritten later, so
    rejected drafts need no cleanup.

    Attributes:
        target: The text's target session.
        device: Device of the target.
        number: Number of the slot.
        sampler: The text's sampler.
        limit: Most positions of the text, limited by the drafter's context.
        pending: Committed rows that have not run yet.
        filled: Number of final rows.
    """

    def __init__(self, drafter: TappedDrafter, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        self.drafter = drafter
        self.target = target
        self.device = target.device
        self.number = target.number
        self.sampler = sampler
        self.limit = drafter.limit(max_length)
        self.pending = Pending()
        self.filled = 0
        self._told = 0  # committed tokens
        self._open = False

    @property
    def pool(self) -> Pool:
        """Keys and values of all slots."""
        return self.drafter.pool(self.target)

    def check(self, input_pos: int) -> None:
        """Checks that `input_pos` is the position of the last committed token.

        Raises:
            ValueError: It is not.
        """
        if input_pos != self._told - 1:
            raise ValueError(
                f"a session with {self._told} committed tokens cannot draft after position {input_pos}; call commit "
                "first."
            )

    @torch.inference_mode()
    def resume(self, prompt: Sequence[int], most: int) -> int:
        pool = self.pool
        slots = range(len(pool.prompts))
        origin = max(slots, key=lambda other: (pool.shared(other, prompt, most), other == self.number))
        held = pool.shared(origin, prompt, most)
        pool.open(self.number, held, origin)
        self._open, self._told = True, held
        if held:
            self.filled = held - 1
            self.take_up(list(prompt[:held]), pool.carried[self.number][-1])
        return held

    def take_up(self, tokens: list[int], carried: Any) -> None:
        """Resumes after these tokens (whole chunks of a prompt), with the value that `carry` returned there."""

    def carry(self) -> Any:
        """State to store after a chunk of a prompt, in addition to keys and values; it must not change later."""

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
        """Adds tokens and states. Whole chunks run at once, the rest before the next drafts.

        Raises:
            ValueError: States are missing, or a position was skipped or repeated.
        """
        if hidden is None:
            raise ValueError("commit needs the target's states for a drafter with taps, got None.")
        if input_pos != self._told:
            raise ValueError(
                f"commit was given the tokens from position {input_pos} on, but the next one is {self._told}; a "
                "drafter with taps needs every committed position once, in order."
            )
        if not self._open:
            self.pool.open(self.number)
            self._open = True
        pool, end = self.pool, input_pos + len(tokens)
        kept = pool.prompts[self.number]
        # Only whole chunks of a prompt are stored for reuse; the states of a round have other bits.
        keeps = input_pos == len(kept) and len(tokens) >= CHUNK
        self.pending.add(list(tokens)[: max(0, self.limit - input_pos)], input_pos, hidden)
        self._told = end
        while len(self.pending) >= (size := CHUNK - (self.filled + 1) % CHUNK):
            self.absorb(size)
            if keeps and self.filled + 1 <= end:
                kept += tokens[len(kept) - input_pos : self.filled + 1 - input_pos]
                pool.carried[self.number].append(self.carry())
        self.pending.keep()

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return self.drafter.propose_batch([self], [token], [input_pos], [k])[0]

    def absorb(self, size: int) -> None:
        """Runs the first pending rows of this session alone."""
        self.drafter.absorb([self], [size], range(self.number, self.number + 1), None)


def places_of(cache: KVCache, members: range, places: Mapping[int, int], rows: int) -> Places:
    """The positions at which rows begin in neighbouring slots.

    Args:
        cache: Cache of these slots.
        members: Numbers of the slots.
        places: Positions by slot. Other slots are idle and write to the end of their buffer, which no text uses.
        rows: Total number of rows written from there on.
    """
    longest = max(places.values())
    if len(members) == 1:  # a view, which avoids a copy to the device
        return Places(cache.slots[longest : longest + 1], longest)
    idle = cache.size - rows
    return Places(torch.tensor([places.get(n, idle) for n in members], device=cache.slots.device), longest)


def padded(rows: Sequence[Tensor], numbers: Sequence[int], members: range, width: int | None = None) -> Tensor:
    """Pads the rows of some slots with zeros to blocks of one width: `(N * W, ...)`.

    Args:
        rows: Rows of each slot, `(n, ...)`.
        numbers: Numbers of these slots.
        members: The slots that run.
        width: W; None for that of the longest.
    """
    width = max(own.size(0) for own in rows) if width is None else width
    if len(members) == 1 and rows[0].size(0) == width:
        return rows[0]
    blocks = rows[0].new_zeros(len(members), width, *rows[0].shape[1:])
    for number, own in zip(numbers, rows):
        blocks[number - members.start, : own.size(0)] = own
    return blocks.flatten(0, 1)


def padded_tokens(
    tokens: Sequence[Sequence[int]], numbers: Sequence[int], members: range, width: int, device: torch.device
) -> Tensor:
    """Like `padded`, for token ids: `(N * W,)`."""
    blocks = [[0] * width for _ in members]
    for number, own in zip(numbers, tokens):
        blocks[number - members.start][: len(own)] = own
    return torch.tensor([token for block in blocks for token in block], device=device)


def leading(rows: Tensor, width: int) -> Tensor:
    """Each of the rows `(N, ...)` as the first row of a block, padded with zeros: `(N * width, ...)`.

    A row of a chain does not see later rows, and the next step overwrites them.
    """
    if width == 1:
        return rows
    blocks = rows.new_zeros(rows.size(0), width, *rows.shape[1:])
    blocks[:, 0] = rows
    return blocks.flatten(0, 1)


def in_multiples(function: Callable[..., Tensor], of: int | None, *rows: Tensor) -> Tensor:
    """Runs a function of independent rows on a multiple of `of` rows; None: without padding."""
    n = rows[0].size(0)
    missing = 0 if of is None else -n % of
    if not missing:
        return function(*rows)
    return function(*(torch.cat((each, each.new_zeros(missing, *each.shape[1:]))) for each in rows))[:n]


def inputs_of(sessions: Sequence[TappedSession], members: range, places: Sequence[int], k: int) -> Inputs:
    """Sampler inputs of some texts; idle slots get a copy of one text's inputs.

    Args:
        sessions: Sessions of the texts.
        members: The slots that run.
        places: Position of each text's first draft.
        k: Drafts per text.
    """
    own = {each.number: each.sampler.inputs(each.device, place, k) for each, place in zip(sessions, places)}
    return Inputs.stacked([own.get(number, own[sessions[0].number]) for number in members])


def draw_chain(
    sessions: Sequence[TappedSession],
    members: range,
    inputs: Inputs,
    logits: Tensor,
    step: Callable[[Tensor, int], Tensor],
    k: Sequence[int],
) -> list[Proposal]:
    """Draws tokens one after the other.

    Args:
        sessions: Sessions of the texts; their samplers have equal `batch_key`s.
        members: The slots that run.
        inputs: Sampler inputs of all draws, see `inputs_of`.
        logits: Logits of each slot's first token, `(N, V)`.
        step: Given the i-th token of each slot, `(N,)`, and i, returns the logits of the next token.
        k: Tokens to draft per text.
    """
    sampler = sessions[0].sampler
    drawn = [sampler.draw(logits, inputs.row(0))]
    for i in range(1, max(k)):
        drawn.append(sampler.draw(step(drawn[-1][0], i - 1), inputs.row(i, [token for token, _ in drawn])))
    wanted = [0] * len(members)
    for session, own in zip(sessions, k):
        wanted[session.number - members.start] = own
    found = proposals(stacked(drawn), wanted)
    return [found[session.number - members.start] for session in sessions]


def cache_bytes(layers: Layers, length: int) -> int:
    """Bytes of the keys and values of a text with `length` tokens."""
    shapes = [block.attn.cache_shape(1, kv_bucket(length)) for block in layers.transformer.h]
    return sum(2 * math.prod(shape) for shape in shapes) * embedding_of(layers).weight.element_size()
