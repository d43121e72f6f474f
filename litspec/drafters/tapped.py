"""What drafters that read the target's states have in common: layers with keys and values of their own."""

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

# Tokens of a prompt whose rows run at once; whatever parts it comes in, it is cut in the same places, those of the
# target, so that both have kept the same chunks of it when the next prompt begins alike.
CHUNK = PREFILL_CHUNK
# A head proposes as many tokens as are asked for, but its later ones are seldom right.
MAX_K = 15
# Rows of a text that may wait to run together with those of others; more of them run by themselves.
WAITING = 16
# Numbers of rows of a text that are tried for steps whose bits count. A single row would be cheaper, but its products
# have other bits than those of several: in bfloat16 so seldom (one number of 30,000) that no trial would show it.
STEP_ROWS = (2, EXACT_ROWS)
# No forward whose bits count has more texts.
EXACT_TEXTS = 16
# Places after a text for rows that are drafted or fill up a forward, and as many where idle slots run along.
OVERHANG = 2 * (WAITING + MAX_K)


class Places(NamedTuple):
    """Where the rows of some neighbouring slots begin.

    Attributes:
        first: `(N,)`.
        longest: The largest of those that count.
    """

    first: Tensor
    longest: int

    def after(self, rows: int) -> Places:
        """So many rows further on."""
        return Places(self.first + rows, self.longest + rows)


class Layers(GPT):
    """Decoder layers alone: a GPT whose embedding and head are not used.

    Args:
        config: Of the layers, with a vocabulary of one.
        blocks: The layers, where they are not those of the config.
    """

    def __init__(self, config: Config, blocks: list[nn.Module] | None = None) -> None:
        super().__init__(config)
        if blocks is not None:
            self.transformer.h = cast(Sequence[Block], nn.ModuleList(blocks))
            self.bind()

    def run(self, layer: int, x: Tensor, places: Places, cache: KVCache, exact: bool = False) -> Tensor:
        """Rows `x` of each sequence of a cache through one layer, `(N * W, C)`, written from their places on."""
        width = x.size(0) // places.first.size(0)
        step = self._step(cache, places.first, width, cache.bucket(places.longest + width), exact=exact)
        return self._blocks[layer](x, step, cache.k[layer], cache.v[layer])


def load_layers(
    make: Callable[[], Layers], weights: Mapping[str, Tensor], folder: Path, like: Tensor
) -> tuple[Layers, int]:
    """Builds layers and gives them their weights, without a second copy of them.

    Args:
        make: Builds them; called on the meta device.
        weights: By the layers' names, `transformer.h.0.` and so on.
        folder: For messages.
        like: A tensor of the device and type to use.

    Returns:
        The layers, and the bytes of their weights.

    Raises:
        InputError: For a weight that is missing or has another shape.
    """
    with torch.device("meta"):
        layers = make().eval().requires_grad_(False)
    state, size = {}, 0
    for name, old in layers.state_dict().items():
        if not name.startswith("transformer.h."):
            state[name] = torch.zeros(old.shape, dtype=like.dtype, device=like.device)
            continue
        if name not in weights:
            raise InputError(f"The weights in {str(folder)!r} lack one that becomes {name!r} in LitGPT's names.")
        new = weights[name]
        if new.shape != old.shape:
            raise InputError(
                f"A weight in {str(folder)!r} does not fit its config.json: what becomes {name!r} in LitGPT's names "
                f"has shape {tuple(new.shape)}, the config makes it {tuple(old.shape)}."
            )
        state[name] = new.to(like.device, like.dtype)
        size += state[name].numel() * state[name].element_size()
    layers.load_state_dict(state, assign=True)
    return layers.requires_grad_(False), size


def linear(weight: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """A layer without bias as a function of rows."""
    return partial(torch.mm, mat2=weight.to(like.device, like.dtype).t())


def norm(weight: Tensor, eps: float, like: Tensor) -> RMSNormFunction:
    """A norm as a function of rows."""
    return RMSNormFunction(weight.to(like.device, like.dtype), eps)


def embedding_of(model: GPT) -> nn.Embedding:
    """A model's embedding, raw: without a factor that the model itself may put on it."""
    return model.transformer.wte


def head_bytes(model: GPT) -> int:
    """Bytes of a model's head."""
    return sum(p.numel() * p.element_size() for p in model.lm_head.parameters())


def head_logits(model: GPT, x: Tensor) -> Tensor:
    """A model's head on rows that were normed already: `(N, V)`."""
    logits: Tensor = model.lm_head(x)
    cap = model.config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


Drawn = tuple[Tensor, Distribution | None]


def stacked(drawn: Sequence[Drawn]) -> Drawn:
    """Tokens of N texts that were drawn one by one, each with its distribution, as `(N, k)` and k rows for each."""
    q = [each for _, each in drawn if each is not None]
    tokens = torch.stack([token for token, _ in drawn], 1)
    if not q:
        return tokens, None
    ids = [each.ids for each in q if each.ids is not None]
    return tokens, Distribution(torch.stack([each.probs for each in q], 1), torch.stack(ids, 1) if ids else None)


def proposals(drawn: Drawn, k: Sequence[int]) -> list[Proposal]:
    """What each text wants of the tokens that were drawn, its first k."""
    tokens, q = drawn
    found = []
    for i, own in enumerate(k):
        given = None
        if q is not None:
            given = Distribution(q.probs[i], None if q.ids is None else q.ids[i]).first(own)
        found.append(Proposal(tokens[i, :own], given))
    return found


class Pending:
    """Tokens and states that a session was told and has not run yet.

    Row p pairs the state at position p with the token after it, so the text's first token makes no row.

    Attributes:
        tokens: One for each row.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._hidden: list[Tensor] = []

    def add(self, tokens: list[int], input_pos: int, hidden: Tensor | None) -> None:
        """Takes up what `DraftSession.commit` was told; `keep` follows once full chunks were taken."""
        if hidden is None:
            raise ValueError("a drafter with taps must be told the target's states")
        skip = 1 if input_pos == 0 else 0
        self.tokens += tokens[skip:]
        if len(tokens) > skip:
            self._hidden.append(hidden[skip : len(tokens)])

    def take(self, size: int) -> tuple[list[int], Tensor]:
        """The first rows: their tokens, and their states `(size, taps * C)`."""
        hidden = self._hidden[0] if len(self._hidden) == 1 else torch.cat(self._hidden)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        self._hidden = [hidden[size:]] if self.tokens else []
        return tokens, hidden[:size]

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self) -> None:
        """Copies what is left of the states that came last: their tensor may be written over, and is larger."""
        if self._hidden:
            self._hidden[-1] = self._hidden[-1].clone()


class Pool:
    """What a drafter keeps for all slots of an engine.

    Attributes:
        cache: Keys and values, `(B, G, S, D)` a layer.
        prompts: By slot, the tokens at its beginning that came as whole chunks of a prompt.
        carried: By slot, what else a session must know after each of these chunks.
    """

    def __init__(self, cache: KVCache) -> None:
        count = cache.shape[0]
        self.cache = cache
        self.prompts: list[list[int]] = [[] for _ in range(count)]
        self.carried: list[list[Any]] = [[] for _ in range(count)]

    def shared(self, number: int, prompt: Sequence[int], most: int) -> int:
        """Tokens at the beginning of a prompt that a slot holds, whole chunks, at most so many."""
        known = self.prompts[number]
        end = min(len(known), most) // CHUNK * CHUNK
        while known[:end] != list(prompt[:end]):
            end -= CHUNK
        return end

    def open(self, number: int, held: int = 0, origin: int = 0) -> None:
        """Begins a text in a slot, with the first `held` tokens of what stands in another.

        Behind them all is zeroed: a mask does not hide a NaN that an earlier text left.
        """
        rows = max(0, held - 1)  # a row waits for the token after it
        prompt, carried = self.prompts[origin][:held], self.carried[origin][: held // CHUNK]
        # Interrupted on the way, a slot holds nothing, rather than half of what it says.
        self.prompts[number], self.carried[number] = [], []
        if number != origin and rows:
            self.cache.sequences(number, number + 1).copy_from(self.cache.sequences(origin, origin + 1), rows)
        self.prompts[number], self.carried[number] = prompt, carried
        for buffer in (*self.cache.k, *self.cache.v):
            buffer[number, :, rows:] = 0


class TappedDrafter(Drafter):
    """A drafter that reads the target's states, with keys and values for all slots of an engine."""

    @property
    @abstractmethod
    def block_size(self) -> int | None:
        """Positions that it was made for; None for any."""

    @abstractmethod
    def make_cache(self, target: TargetSession, length: int, count: int) -> KVCache:
        """Keys and values for texts of so many tokens, in as many slots as `count` says."""

    @abstractmethod
    def absorb(self, sessions: Sequence[Any], sizes: Sequence[int], members: range, width: int | None) -> None:
        """Runs the first rows that wait in some sessions, with the target's states, for good.

        Args:
            sessions: In the order of their slots.
            sizes: How many rows of each, at least 1.
            members: The slots that run.
            width: Rows that each text is filled up to where bits count; None: as many as needed.
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
        """Drafts for sessions that have no rows waiting, whose samplers are of one kind.

        Args:
            sessions: In the order of their slots.
            tokens: The last committed one of each.
            k: Tokens that each wants, at least 1.
            members: The slots that run.
            exact: Rows of each text in a step, see `step_rows`; None where bits do not count.
        """

    @abstractmethod
    def try_rows(
        self, target: TargetSession, ids: Tensor, states: Tensor, places: Places, cache: KVCache
    ) -> list[Tensor]:
        """What rows come to in all layers and the head, each `(B * n, ...)`, to find out which bits they have.

        Args:
            target: The target's session.
            ids: `(B, n)`.
            states: The target's, `(B, n, taps * C)`.
            places: Where the rows stand in each sequence.
            cache: Of these sequences.
        """

    @property
    def exact(self) -> Sequence[int]:
        """Numbers of rows of a text that a step may have where its bits count, the cheapest first."""
        return STEP_ROWS

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of a text in the widest forward of `draft`."""

    @cached_property
    def _most_texts(self) -> WeakKeyDictionary[GPT, dict[int, int]]:
        """By target and rows of each text, what was measured."""
        return WeakKeyDictionary()

    def most_texts(self, target: TargetSession, rows: int) -> int:
        """Texts of so many rows each that keep their bits in one forward; measured once."""
        found = self._most_texts.setdefault(target.model, {})
        if rows not in found:
            found[rows] = max(1, self.row_limit(target, rows) // rows)
        return found[rows]

    def row_limit(self, target: TargetSession, rows: int) -> int:
        """Rows in all that keep their bits in one forward over texts of so many each."""
        return class_limit(Tried(self, target), (rows,), min(EXACT_TEXTS * rows, MOST_ROWS))

    def step_rows(self, target: TargetSession) -> int | None:
        """Rows of each text in a step with which most texts keep their bits together; None where no two do."""
        most, found = 1, None
        for rows in self.exact:
            if (texts := self.most_texts(target, rows)) > most:
                most, found = texts, rows
            if most >= EXACT_TEXTS:
                break
        return found

    def limit(self, max_length: int) -> int:
        """Positions that it can hold of a text."""
        return max_length if self.block_size is None else min(max_length, self.block_size)

    def pool(self, target: TargetSession) -> Pool:
        """What is kept for all slots of the engine that a text runs in; made for the first of its texts."""
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
        """Drafts for all texts in one forward a step.

        Some texts depend on the drafts' bits, as with the rejection sampler. Alone and in a batch these must be the
        same, so numbers of rows are used whose bits were found to be equal. Where there are none, these texts are
        drafted one by one.
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
                together.setdefault((session.sampler.kind, exact, alone), []).append(i)
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

    Keys and values that stand for good come from the target's states only. What drafts write stands after them and is
    overwritten, so there is nothing to undo.

    Attributes:
        target: The text's target session.
        device: Of the target.
        number: Of the slot.
        sampler: The text's.
        limit: Positions that the drafter can hold of the text.
        pending: What was told and has not run.
        filled: Rows that have run for good.
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
        self._told = 0  # tokens
        self._open = False

    @property
    def pool(self) -> Pool:
        """Keys and values of all slots."""
        return self.drafter.pool(self.target)

    def check(self, input_pos: int) -> None:
        """Refuses to draft after a position that is not the last one told.

        Raises:
            ValueError: It is another.
        """
        if input_pos != self._told - 1:
            raise ValueError(
                f"a session that was told {self._told} tokens cannot draft after position {input_pos}; commit must "
                "come first."
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
        """Goes on after these tokens, whole chunks of a prompt, with what `carry` gave there."""

    def carry(self) -> Any:
        """What must be known after a chunk of a prompt beside keys and values; not written to any more."""

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
        """Takes states; they run in whole chunks, and what is left when drafts are wanted.

        Raises:
            ValueError: States are missing; without them every later draft would be wrong.
        """
        if hidden is None:
            raise ValueError("commit was given no states; a drafter with taps must be told them.")
        if input_pos != self._told:
            raise ValueError(
                f"commit was given the tokens from position {input_pos} on, but the next one is {self._told}; a "
                "drafter with taps must be told every committed position once, in order."
            )
        if not self._open:
            self.pool.open(self.number)
            self._open = True
        pool, end = self.pool, input_pos + len(tokens)
        kept = pool.prompts[self.number]
        # Of a prompt, whole chunks; a round's states have other bits, and are not kept.
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
        """Runs the first rows that wait, by themselves."""
        self.drafter.absorb([self], [size], range(self.number, self.number + 1), None)


def places_of(cache: KVCache, members: range, places: Mapping[int, int], rows: int) -> Places:
    """Where rows begin in neighbouring slots.

    Args:
        cache: Of these slots.
        members: Their numbers.
        places: By slot; a slot without one runs along in the last places of its buffer, where no text ever stands.
        rows: How many rows run from there on, in all.
    """
    longest = max(places.values())
    if len(members) == 1:  # a number that is on the device already
        return Places(cache.slots[longest : longest + 1], longest)
    idle = cache.size - rows
    return Places(torch.tensor([places.get(n, idle) for n in members], device=cache.slots.device), longest)


def padded(rows: Sequence[Tensor], numbers: Sequence[int], members: range, width: int | None = None) -> Tensor:
    """Rows of some slots as blocks of one width, zeros where there are none: `(N * W, ...)`.

    Args:
        rows: Of each, `(n, ...)`.
        numbers: Their slots.
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
    """The same for token ids, `(N * W,)`."""
    blocks = [[0] * width for _ in members]
    for number, own in zip(numbers, tokens):
        blocks[number - members.start][: len(own)] = own
    return torch.tensor([token for block in blocks for token in block], device=device)


def leading(rows: Tensor, width: int) -> Tensor:
    """Rows `(N, ...)` as the first of a block each, zeros behind them: `(N * width, ...)`.

    What stands behind a row of a chain is not seen by it, and is written over by the next step.
    """
    if width == 1:
        return rows
    blocks = rows.new_zeros(rows.size(0), width, *rows.shape[1:])
    blocks[:, 0] = rows
    return blocks.flatten(0, 1)


def in_multiples(function: Callable[..., Tensor], of: int | None, *rows: Tensor) -> Tensor:
    """A function of rows that each have a result of their own, run on a multiple of so many; None: on those alone."""
    n = rows[0].size(0)
    missing = 0 if of is None else -n % of
    if not missing:
        return function(*rows)
    return function(*(torch.cat((each, each.new_zeros(missing, *each.shape[1:]))) for each in rows))[:n]


def inputs_of(sessions: Sequence[TappedSession], members: range, places: Sequence[int], k: int) -> Inputs:
    """What the draws of some texts depend on, with a copy of one text's for each idle slot.

    Args:
        sessions: The texts'.
        members: The slots that run.
        places: Position of each text's first draft.
        k: How many are drawn.
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
        sessions: The texts'; their samplers are of one kind.
        members: The slots that run.
        inputs: Of all draws, see `inputs_of`.
        logits: Of the first token of each slot, `(N, V)`.
        step: Given the i-th token of each, `(N,)`, and i, the logits of the next.
        k: How many tokens each text wants.
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
    """Bytes of the keys and values of a text of so many tokens."""
    shapes = [block.attn.cache_shape(1, kv_bucket(length)) for block in layers.transformer.h]
    return sum(2 * math.prod(shape) for shape in shapes) * embedding_of(layers).weight.element_size()
