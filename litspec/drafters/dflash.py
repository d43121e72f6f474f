"""A block drafter that reads the target's hidden states (DFlash, arXiv 2602.06036; versions 1 and 2)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.tapped import joined
from litspec.errors import InputError
from litspec.model.dflash import DFlashConfig, DFlashNetwork, Join, Rope
from litspec.sampling import Distribution, Sampler

if TYPE_CHECKING:
    from litgpt import Config

    from litspec.engine.target import TargetSession

# Rows of context that are read at once; of a long prompt no more than their states are then held beside the keys.
CONTEXT_CHUNK = 512
# The target's, which the drafter borrows: raw, without the factor that Gemma multiplies it with.
EMBEDDING = "transformer.wte.weight"


def check_fit(config: DFlashConfig, target: Config, what: str = "The DFlash drafter") -> None:
    """Refuses a target that the drafter was not made for.

    Args:
        config: The drafter's.
        target: The target's.
        what: Names the drafter in the sentence.

    Raises:
        InputError: Names what differs, with both numbers.
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


class DFlash(Drafter):
    """Drafts a whole block in one forward, see `drafters.Drafter`.

    Each position has a softmax of its own, so a proposal is a draw from known distributions. Version 2 draws from left
    to right, among the likeliest ids of each position, scored by the token before.

    Args:
        network: Its weights, which are frozen. Targets of another dtype or device get a copy.
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
        self._rope: dict[DFlashNetwork, Rope] = {}
        self._lock = threading.Lock()

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

    def rope(self, network: DFlashNetwork, length: int) -> Rope:
        """Tables of at least `length` positions, made once."""
        with self._lock:
            if network not in self._rope or self._rope[network][0].size(0) < length:
                self._rope[network] = network.rope_tables(length)
            return self._rope[network]


class DFlashSession(DraftSession):
    """One text, see `drafters.DraftSession`.

    Keys and values of committed positions stand in order; those of a block stand after them while it runs, and what is
    committed next overwrites them. So there is nothing to undo, and a refused draft leaves no trace.
    """

    def __init__(self, drafter: DFlash, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        self._config = config = drafter.config
        self._target = target
        self._sampler = sampler
        self._wte = wte = target.model.get_parameter(EMBEDDING)
        self._network = network = drafter.like(wte)
        slots = max_length + config.block_size
        self._rope = drafter.rope(network, slots)
        shape = (config.n_query_groups, slots, config.head_size)
        self._k = [wte.new_empty(shape) for _ in range(config.n_layer)]
        self._v = [wte.new_empty(shape) for _ in range(config.n_layer)]
        self._mask_ids = torch.full((config.block_size - 1,), config.mask_token_id, device=wte.device)
        self._target_ids: Tensor | None = None
        if network.d2t is not None:
            self._target_ids = network.d2t + torch.arange(network.d2t.size(0), device=wte.device)
        self._known = 0  # positions whose keys and values stand in the buffers
        self._widest = 0 if None in config.windows else max(window or 0 for window in config.windows)

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
        """Reads the states before some committed tokens.

        Raises:
            ValueError: States of an earlier position are missing; without them every later draft would be wrong.
        """
        if hidden is None:
            raise ValueError("commit was given no states; a DFlash session needs what its taps saw.")
        # Row j is the state at the position before that of tokens[j]; before position 0 there is none.
        states, start = (hidden[1:], 0) if input_pos == 0 else (hidden, input_pos - 1)
        if start != self._known:
            raise ValueError(
                f"commit was given the target's states from position {start} on, but the next one is {self._known}; "
                "a DFlash session must be told every committed position once, in order."
            )
        for chunk in states.split(CONTEXT_CHUNK):
            end = start + chunk.size(0)
            rope = self._rope[0][start:end], self._rope[1][start:end]
            context = self._network.context(chunk.to(self._rope[0]), rope)
            for (k, v), k_buffer, v_buffer in zip(context, self._k, self._v):
                k_buffer[:, start:end] = k.transpose(0, 1)
                v_buffer[:, start:end] = v.transpose(0, 1)
            start = end
        self._known = start

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        """Runs the whole block, whatever k, since its rows see each other; then cuts it.

        Raises:
            ValueError: Positions before `token` were not told by `commit`.
        """
        k = min(k, self._config.max_k)
        first = self._mask_ids.new_full((1,), token)
        if k < 1:
            return Proposal(first[:0])
        rows = self._rows(first, input_pos)
        skipped = 0 if self._config.sample_from_anchor else 1
        rows = rows[skipped : skipped + k]
        logits = self._logits(rows)
        if self._network.candidate_selector is not None:
            return self._select(rows, logits, first, input_pos + 1)
        inputs = self._sampler.inputs(logits.device, input_pos + 1, k)
        drawn: list[tuple[Tensor, Distribution | None]] = []
        for j in range(k):
            drawn.append(self._sampler.draw(logits[j : j + 1], inputs.row(j, [token for token, _ in drawn])))
        return joined(drawn)

    def logits(self, token: int, input_pos: int) -> Tensor:
        """What a block's proposals are drawn from before version 2 selects: (max_k, V) over the target's ids."""
        with torch.inference_mode():
            rows = self._rows(self._mask_ids.new_full((1,), token), input_pos)
            return self._logits(rows if self._config.sample_from_anchor else rows[1:])

    def _rows(self, first: Tensor, input_pos: int) -> Tensor:
        """The block's rows for the head, (B, C)."""
        config = self._config
        if input_pos != self._known:
            raise ValueError(
                f"a DFlash session that was told {self._known} positions cannot draft after position {input_pos}; "
                "commit must come first."
            )
        ids = torch.cat((first, self._mask_ids))
        x = F.embedding(ids, self._wte)
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        end = input_pos + config.block_size
        # Where every layer has a window, what lies before the widest is out of sight.
        begin = max(0, input_pos - self._widest) if self._widest else 0
        joins = [self._join(layer, begin, input_pos, end) for layer in range(config.n_layer)]
        masks = self._network.masks(input_pos - begin, x.device)
        rope = self._rope[0][input_pos:end], self._rope[1][input_pos:end]
        return self._network(x, rope, joins, masks)

    def _join(self, layer: int, begin: int, start: int, end: int) -> Join:
        k_buffer, v_buffer = self._k[layer], self._v[layer]

        def join(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k_buffer[:, start:end] = k.transpose(0, 1)
            v_buffer[:, start:end] = v.transpose(0, 1)
            return k_buffer[:, begin:end], v_buffer[:, begin:end]

        return join

    def _logits(self, rows: Tensor) -> Tensor:
        """Logits (R, V) of rows (R, C), -inf for ids that the drafter does not have."""
        config, target = self._config, self._target
        head = self._network.lm_head or target.model.lm_head
        logits: Tensor = head(rows)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        cap = target.config.final_logit_softcapping if config.softcap is None else config.softcap
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if self._target_ids is None:
            return logits
        return logits.new_full((rows.size(0), config.vocab_size), -torch.inf).index_copy(1, self._target_ids, logits)

    def _select(self, rows: Tensor, logits: Tensor, before: Tensor, position: int) -> Proposal:
        """Draws from left to right among the likeliest ids of each position."""
        selector = self._network.candidate_selector
        assert selector is not None
        inputs = self._sampler.inputs(logits.device, position, rows.size(0))
        # Ids that must not come yet would take the places of others.
        candidates = self._sampler.adjust(logits, inputs).topk(min(selector.top_k, logits.size(1))).indices
        scores = logits.float().gather(1, candidates)
        rows = selector.hidden_projection(rows)
        nowhere = torch.full_like(logits[:1], -torch.inf, dtype=torch.float32)
        drawn: list[tuple[Tensor, Distribution | None]] = []
        for j in range(rows.size(0)):
            ids = candidates[j : j + 1]
            edges = selector(rows[j : j + 1], before, ids).float()
            total = nowhere.scatter(1, ids, scores[j : j + 1] + edges)
            before, q = self._sampler.draw(total, inputs.row(j, [token for token, _ in drawn]))
            if q is not None and inputs.context is None:
                q = Distribution(q.at(Distribution(scores[j : j + 1], ids)), ids)
            drawn.append((before, q))
        return joined(drawn)
