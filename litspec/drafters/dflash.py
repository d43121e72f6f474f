"""A block drafter that reads the target's hidden states (DFlash, arXiv 2602.06036; versions 1 and 2)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from litspec.drafters.autoregressive import EXACT_ROWS, MOST_ROWS
from litspec.drafters.base import Cost, Proposal
from litspec.drafters.tapped import (
    CHUNK,
    Drawn,
    Places,
    TappedDrafter,
    TappedSession,
    Tried,
    in_multiples,
    places_of,
    proposals,
    stacked,
)
from litspec.engine.rows import class_limit
from litspec.errors import InputError
from litspec.model.dflash import DFlashConfig, DFlashNetwork, Rope
from litspec.model.kv_cache import KVCache, Step, kv_bucket
from litspec.sampling import Distribution, Inputs, Sampler

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.engine.target import TargetSession

# The target's embedding, which the drafter shares. It is used without Gemma's embedding scale.
EMBEDDING = "transformer.wte.weight"


def check_fit(config: DFlashConfig, target: Config, what: str = "The DFlash drafter") -> None:
    """Checks that the drafter was made for a target.

    Args:
        config: The drafter's config.
        target: The target's config.
        what: The drafter's name in error messages.

    Raises:
        InputError: The drafter was made for another target.
    """
    if config.n_embd != target.n_embd:
        raise InputError(
            f"{what} was made for a target of hidden size {config.n_embd}, but {target.name!r} has {target.n_embd}; "
            "give a drafter for this target."
        )
    if config.vocab_size != target.padded_vocab_size:
        raise InputError(
            f"{what} was made for a vocabulary of {config.vocab_size} entries, but {target.name!r} has "
            f"{target.padded_vocab_size}; give a drafter for this target."
        )
    if beyond := [tap for tap in config.taps if not -1 <= tap < target.n_layer]:
        raise InputError(
            f"{what} reads the target's block {beyond[0]} (counted from 0), but {target.name!r} has {target.n_layer} "
            "blocks; give a drafter for this target."
        )
    if not 0 <= config.mask_token_id < target.padded_vocab_size:
        raise InputError(
            f"{what} has mask_token_id {config.mask_token_id}, but {target.name!r} has ids below "
            f"{target.padded_vocab_size}; give a drafter for this target."
        )


class DFlash(TappedDrafter):
    """Drafts a whole block in one forward, see `drafters.Drafter`.

    Each position has its own softmax, so a proposal is drawn from known distributions. Version 2 draws from left to
    right among the most likely ids of each position. Their scores also depend on the previous token.

    Args:
        network: The network; its weights are frozen. Targets of another dtype or device get a copy.
    """

    def __init__(self, network: DFlashNetwork) -> None:
        self.network = network.eval().requires_grad_(False)
        self.config = network.config
        self.taps = self.config.taps
        self.max_k = self.config.max_k
        head = 0 if network.lm_head is not None else self.config.n_embd * self.config.vocab_size
        sizes = sum(p.numel() for p in network.parameters()) + head
        self._weight_bytes = sizes * network.fc.weight.element_size()
        self._copies: dict[tuple[torch.device, torch.dtype], DFlashNetwork] = {}
        self._lock = threading.Lock()
        self._widest = 0 if None in self.config.windows else max(window or 0 for window in self.config.windows)

    @property
    def name(self) -> str:
        return "dflash"

    def cost(self, k: int) -> Cost:
        """One forward and one product with the head serve all proposals of a round."""
        return Cost(self._weight_bytes, self.config.n_layer) if k > 0 else Cost(0, 0)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> DFlashSession:
        """Opens a session, see `drafters.Drafter`.

        Raises:
            InputError: The drafter was made for another target.
        """
        check_fit(self.config, target.config)
        return DFlashSession(self, target, max_length, sampler)

    def like(self, weight: Tensor) -> DFlashNetwork:
        """The network in a weight's dtype and on its device."""
        own = self.network.fc.weight
        key = weight.device, weight.dtype
        if key == (own.device, own.dtype):
            return self.network
        with self._lock:
            if key not in self._copies:
                self._copies[key] = copy.deepcopy(self.network).to(*key)
            return self._copies[key]

    @property
    def block_size(self) -> None:
        return None

    @property
    def rows(self) -> int:
        return self.config.block_size

    def memory(self, max_length: int) -> int:
        config = self.config
        keys = 2 * config.n_layer * config.n_query_groups * config.head_size
        states = CHUNK * len(config.taps) * config.n_embd
        slots = kv_bucket(max_length + 2 * config.block_size)
        return (slots * keys + states) * self.network.fc.weight.element_size()

    @torch.inference_mode(False)  # tensors made in inference mode can only be written to in inference mode
    @torch.no_grad()
    def make_cache(self, target: TargetSession, length: int, count: int) -> KVCache:
        config, network = self.config, self.network_of(target)
        # The block is written after the text, and idle slots write after that.
        slots = kv_bucket(length + 2 * config.block_size)
        shape = count, config.n_query_groups, slots, config.head_size
        like = network.fc.weight
        k, v = ([torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in network.layers] for _ in "kv")
        cos, sin = network.rope_tables(slots)
        return KVCache(k, v, [torch.cat((cos, sin), 1)], length)

    def network_of(self, target: TargetSession) -> DFlashNetwork:
        """The network in the target's dtype and on its device."""
        return self.like(target.model.get_parameter(EMBEDDING))

    @property
    def exact(self) -> Sequence[int]:
        return (self.config.block_size,)

    def row_limit(self, target: TargetSession, rows: int) -> int:
        # Outside of blocks there are products of independent rows: of contexts, and of the head.
        alone = class_limit(TriedProducts(self, target), (EXACT_ROWS,), MOST_ROWS)
        if rows != self.config.block_size:
            return alone
        return min(alone, super().row_limit(target, rows)) if alone > rows else rows

    def absorb(
        self, sessions: Sequence[DFlashSession], sizes: Sequence[int], members: range, width: int | None
    ) -> None:
        cache, network = sessions[0].pool.cache, self.network_of(sessions[0].target)
        hidden = [session.pending.take(size)[1] for session, size in zip(sessions, sizes)]
        starts = [session.filled for session in sessions]
        for session, size in zip(sessions, sizes):
            session.filled += size
        if len(sessions) == 1:
            number, rows = sessions[0].number, slice(starts[0], starts[0] + sizes[0])
            places = cache.slots[rows]
        else:
            told = zip(sessions, starts, sizes)
            where = torch.tensor(
                [(each.number, start + i) for each, start, size in told for i in range(size)], device=cache.slots.device
            )
            numbers, places = where.unbind(1)
        rope = cache.rope[0].index_select(0, places).split(1, dim=1)
        n, states = len(places), torch.cat(hidden).to(network.fc.weight)
        if missing := 0 if width is None else len(sessions) * width - n:
            states = F.pad(states, (0, 0, 0, missing))
            rope = tuple(F.pad(each, (0, 0, 0, 0, 0, missing)) for each in rope)
        for (k, v), k_buffer, v_buffer in zip(network.context(states, (rope[0], rope[1])), cache.k, cache.v):
            for buffer, new in ((k_buffer, k[:n]), (v_buffer, v[:n])):
                if len(sessions) == 1:
                    buffer[number, :, rows] = new.transpose(0, 1)
                else:
                    buffer[numbers, :, places] = new

    def draft(
        self,
        sessions: Sequence[DFlashSession],
        tokens: Sequence[int],
        k: Sequence[int],
        members: range,
        exact: int | None,
    ) -> list[Proposal]:
        """Runs whole blocks for every k, since rows may attend to later rows; then keeps the first k proposals."""
        most, multiple = max(k), None if exact is None else EXACT_ROWS
        first, rows = self._blocks(sessions, tokens, members, exact is not None)
        rows = rows[:, :most]
        logits = self._logits(sessions[0].target, rows, multiple)
        sampler = sessions[0].sampler
        inputs = Inputs.stacked([each.sampler.inputs(each.device, each.filled + 1, most) for each in sessions])
        if self.config.selector_top_k:
            network = self.network_of(sessions[0].target)
            return proposals(self._select(sampler, network, rows, logits, first, inputs, multiple), k)
        if inputs.context is None:  # no row depends on another row's token
            early = None if inputs.early is None else inputs.early.flatten()
            token, q = sampler.draw(logits.flatten(0, 1), Inputs(inputs.noise.flatten(0, 1), early))
            shape = len(sessions), most
            if q is not None:
                ids = None if q.ids is None else q.ids.view(*shape, -1)
                q = Distribution(q.probs.view(*shape, -1), ids)
            return proposals((token.view(shape), q), k)
        drawn: list[Drawn] = []
        for j in range(most):
            drawn.append(sampler.draw(logits[:, j], inputs.row(j, [token for token, _ in drawn])))
        return proposals(stacked(drawn), k)

    def block_logits(self, session: DFlashSession, token: int) -> Tensor:
        """Logits of a block's proposals, before the selector of version 2: (max_k, V) over the target's ids."""
        _, rows = self._blocks([session], [token], range(session.number, session.number + 1))
        return self._logits(session.target, rows)[0]

    def _blocks(
        self, sessions: Sequence[DFlashSession], tokens: Sequence[int], members: range, exact: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The last committed tokens `(N,)`, and the proposing rows of their blocks, `(N, max_k, C)`."""
        config, target = self.config, sessions[0].target
        cache = sessions[0].pool.cache.sequences(members.start, members.stop)
        width = config.block_size
        places = places_of(cache, members, {each.number: each.filled for each in sessions}, width)
        at = [each.number - members.start for each in sessions]
        ids = torch.full((len(members), width), config.mask_token_id, device=target.device)
        first = torch.tensor(tokens, device=target.device)
        if len(at) == len(members):
            ids[:, 0] = first
        else:
            ids[at, 0] = first
        rows = self._run(target, ids, places, min(each.filled for each in sessions), cache, exact)
        if len(at) < len(members):
            rows = rows[at]
        return first, rows if config.sample_from_anchor else rows[:, 1:]

    def _run(
        self, target: TargetSession, ids: Tensor, places: Places, earliest: int, cache: KVCache, exact: bool
    ) -> Tensor:
        """Blocks of tokens `(N, W)` through all layers, `(N, W, C)`; the first block of all begins at `earliest`."""
        config, network, width = self.config, self.network_of(target), ids.size(1)
        step = Step.at(cache, places.first, width, cache.bucket(places.longest + width), (), exact=exact)
        # If every layer has a window, positions before the widest window are masked. Whole chunks of masked keys do not
        # change the bits of a sum, so a neighbour in the batch may make the forward read more keys.
        begin = max(0, earliest - self._widest) if self._widest else 0
        if exact:
            begin = begin // CHUNK * CHUNK
        x = F.embedding(ids, target.model.get_parameter(EMBEDDING))
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        return network(x, step, cache.k, cache.v, network.masks(step, begin))

    def try_rows(
        self, target: TargetSession, ids: Tensor, states: Tensor, places: Places, cache: KVCache
    ) -> list[Tensor]:
        return [self._run(target, ids, places, int(places.first.min()), cache, exact=True).flatten(0, 1)]

    def try_products(self, target: TargetSession, ids: Tensor, states: Tensor, rope: Rope) -> list[Tensor]:
        """Results of everything that runs outside of blocks, for `(N,)` tokens and states `(N, taps * C)`."""
        network = self.network_of(target)
        x = network.hidden_norm(network.fc(states))
        logits = self._logits(target, x.unsqueeze(0))[0]
        found = [x, logits, *(each for pair in network.context(states, rope) for each in pair)]
        if (selector := network.candidate_selector) is not None:
            candidates = logits.topk(min(selector.top_k, logits.size(-1))).indices
            found.append(selector(selector.hidden_projection(x), ids, candidates))
        return found

    def _logits(self, target: TargetSession, rows: Tensor, multiple: int | None = None) -> Tensor:
        """Logits (N, R, V) of rows (N, R, C), -inf for ids that the drafter does not have.

        The head runs on a multiple of so many rows.
        """
        config, network = self.config, self.network_of(target)
        head = network.lm_head or target.model.lm_head
        logits = in_multiples(head, multiple, rows.flatten(0, 1))
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        cap = target.config.final_logit_softcapping if config.softcap is None else config.softcap
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if network.d2t is not None:
            ids = network.d2t + torch.arange(network.d2t.size(0), device=logits.device)
            everything = logits.new_full((logits.size(0), config.vocab_size), -torch.inf)
            logits = everything.index_copy(1, ids, logits)
        return logits.view(*rows.shape[:2], -1)

    def _select(
        self,
        sampler: Sampler,
        network: DFlashNetwork,
        rows: Tensor,
        logits: Tensor,
        before: Tensor,
        inputs: Inputs,
        multiple: int | None,
    ) -> Drawn:
        """Draws from left to right among the most likely ids of each position."""
        selector = network.candidate_selector
        assert selector is not None
        # Adjust first, or banned ids would take the places of allowed ones.
        candidates = sampler.adjust(logits, inputs).topk(min(selector.top_k, logits.size(-1))).indices
        scores = logits.float().gather(-1, candidates)
        rows = in_multiples(selector.hidden_projection, multiple, rows.flatten(0, 1)).view(*rows.shape[:2], -1)
        nowhere = torch.full_like(logits[:, 0], -torch.inf, dtype=torch.float32)
        drawn: list[Drawn] = []
        for j in range(rows.size(1)):
            ids = candidates[:, j]
            added = in_multiples(selector, multiple, rows[:, j], before, ids)
            total = nowhere.scatter(1, ids, scores[:, j] + added.float())
            before, q = sampler.draw(total, inputs.row(j, [token for token, _ in drawn]))
            if q is not None and inputs.context is None:
                q = Distribution(q.at(Distribution(scores[:, j], ids)), ids)
            drawn.append((before, q))
        return stacked(drawn)


class TriedProducts(Tried):
    """The parts of a DFlash drafter outside of blocks, on random states; see `engine.rows.Layers`."""

    _drafter: DFlash

    def make_cache(self, length: int, width: int, batch_size: int) -> KVCache:
        slots = kv_bucket(length + width)
        none = torch.zeros(batch_size, 1, slots, 2, device=self._target.device)
        self._make_states(slots)
        cos, sin = self._drafter.network_of(self._target).rope_tables(slots)
        return KVCache([none], [none], [torch.cat((cos, sin), 1)], length)

    def run(self, ids: Tensor, first: Sequence[int], cache: KVCache, logits: bool) -> list[Tensor]:
        places = (torch.tensor(first, device=ids.device).unsqueeze(1) + cache.slots[: ids.size(1)]).flatten()
        cos, sin = cache.rope[0].index_select(0, places).split(1, dim=1)
        return self._drafter.try_products(self._target, ids.flatten(), self._states[places], (cos, sin))


class DFlashSession(TappedSession):
    """One text, see `TappedSession`. A block writes its keys and values after the context."""

    drafter: DFlash

    @torch.inference_mode()
    def logits(self, token: int, input_pos: int) -> Tensor:
        """Logits of the proposals, see `DFlash.block_logits`."""
        self.check(input_pos)
        if len(self.pending):
            self.absorb(len(self.pending))
        return self.drafter.block_logits(self, token)
